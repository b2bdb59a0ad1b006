"""The stack of sizes by last use, against a list."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.byte_stack import ByteStack

KEYS = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), KEYS, st.integers(0, 5)),
        st.tuples(st.just("remove"), KEYS, st.just(0)),
        st.tuples(st.just("resize"), KEYS, st.integers(0, 5)),
    ),
    max_size=400,
)


class SmallStack(ByteStack[int]):
    """One whose places run out soon, and whose runs are short."""

    _RUN = 4


@given(STEPS)
def test_distances_are_those_of_a_plain_list(steps):
    stack, model = SmallStack(10), []
    for verb, key, size in steps:
        known = dict(model)
        if verb == "push":
            stack.push(key, size)
            model = [*((k, s) for k, s in model if k != key), (key, size)]
        elif verb == "remove":
            stack.remove(key)
            model = [(k, s) for k, s in model if k != key]
        elif key in known:
            stack.resize(key, size)
            model = [(k, size if k == key else s) for k, s in model]
        assert len(stack) == len(model)
        assert stack.total_bytes == sum(size for _, size in model)
        assert stack.deepest() == (model[0][0] if model else None)
        for at, (k, s) in enumerate(model):
            assert stack.size(k) == s
            assert stack.above(k) == sum(size for _, size in model[at + 1 :])


def test_places_are_used_again_when_they_run_out():
    stack = SmallStack(10)
    for turn in range(1000):
        stack.push(turn % 10, 1)

    assert [stack.above(key) for key in range(10)] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
