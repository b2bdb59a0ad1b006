"""Sessions on several replicas over one store, and after everything was killed and started anew."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from kvstore.drill.store_process import StoreProcess, StoreSettings
from tests.engine.engine_process import TEXT, engine

MIB = 1 << 20


class Replica:
    """An engine process, and the official client of it."""

    def __init__(self, process):
        self.process = process
        self.client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)

    def say(self, text, session, **extra):
        return self.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text}],
            temperature=0,
            max_tokens=6,
            extra_body={"kvstore": {"session": session} | extra},
        )

    def show(self, name):
        return self.client.get(f"/sessions/{name}", cast_to=dict)


@contextlib.contextmanager
def replica(model, store):
    with engine(model, "--store", store.socket_path) as process:
        made = Replica(process)
        with made.client:
            yield made


@pytest.fixture
def store(tmp_path):
    with StoreProcess(tmp_path, StoreSettings(ssd_bytes=64 * MIB, ssd_folder=tmp_path / "ssd")) as store:
        yield store


def test_a_session_goes_on_on_any_replica_and_after_all_were_killed(tiny_gguf, store):
    with replica(tiny_gguf, store) as first, replica(tiny_gguf, store) as second:
        said = [first.say(TEXT, "talk", create=True), second.say("And then?", "talk")]
        kept = first.client.responses.create(model="tiny", input=TEXT, max_output_tokens=4)
        on = second.client.responses.create(
            model="tiny", input="More.", previous_response_id=kept.id, max_output_tokens=4
        )
        before = first.show("talk")
        assert second.show("talk")["messages"] == before["messages"]
        assert said[1].usage.prompt_tokens_details.cached_tokens > 0
        for process in (first.process, second.process, store):
            process.kill()
    store.start()
    with replica(tiny_gguf, store) as third:
        after = third.show("talk")
        assert after["messages"] == before["messages"]
        assert third.say("Why?", "talk").kvstore["session"]["num_turns"] == 3
        assert third.client.responses.retrieve(on.id).output_text == on.output_text
        again = third.client.responses.create(
            model="tiny", input="More.", previous_response_id=on.id, max_output_tokens=4
        )
        assert again.usage.input_tokens > on.usage.input_tokens
        fork = third.client.post("/sessions/talk/fork", cast_to=dict, body={"name": "other", "turns": 1})
        assert fork["num_turns"] == 1
        third.say("Else?", "other")
        assert third.show("talk")["num_turns"] == 3


def test_of_two_replicas_that_continue_a_session_at_once_one_is_told_so(tiny_gguf, store):
    with replica(tiny_gguf, store) as first, replica(tiny_gguf, store) as second:
        first.client.post("/sessions", cast_to=dict, body={"name": "talk"})
        won = 0
        with ThreadPoolExecutor(2) as pool:
            for number in range(10):
                calls = [pool.submit(at.say, f"{number}", "talk") for at in (first, second)]
                errors = [call.exception() for call in calls]
                lost = [error for error in errors if error is not None]
                won += 2 - len(lost)
                assert all(error.code == "session_conflict" for error in lost)
                messages = second.show("talk")["messages"]
                assert [at["role"] for at in messages] == ["user", "assistant"] * won
                assert first.show("talk")["messages"] == messages


def test_a_store_that_is_away_costs_sessions_and_nothing_else(tiny_gguf, store):
    with replica(tiny_gguf, store) as at:
        at.say("one", "talk", create=True)
        store.kill()
        for call in (lambda: at.say("two", "talk"), lambda: at.show("talk")):
            with pytest.raises(openai.InternalServerError) as away:
                call()
            assert (away.value.status_code, away.value.code) == (503, "sessions_unavailable")
        unstored = at.client.responses.create(model="tiny", input=TEXT, max_output_tokens=4)
        assert unstored.store is False
        assert unstored.output_text is not None
        assert at.process.ask()["prompt_tokens"] > 0
        store.start()
        while True:
            with contextlib.suppress(openai.InternalServerError):
                at.say("two", "talk")
                break
        assert at.show("talk")["num_turns"] == 2


def test_a_frozen_store_holds_an_answer_up_for_a_bounded_time(tiny_gguf, store):
    with replica(tiny_gguf, store) as at:
        store.pause()
        answers = [
            at.client.responses.create(model="tiny", input=TEXT, max_output_tokens=4) for _ in range(2)
        ]
        store.resume()
    assert [answer.store for answer in answers] == [False, False]
    # The second one did not wait.
    assert "the store was slow before" in answers[1].kvstore["not_stored"]
