"""The paged forward pass against a contiguous float64 reference, and its reproducibility under reuse."""

import functools
import shutil

import pytest
import torch

from kvstore.layout import KVLayout
from kvstore_engine_adapter.attention import Segment, TorchPageOps
from kvstore_engine_adapter.cpu_page_ops import CpuPageOps, page_ops_for
from kvstore_engine_adapter.exact_rows import cancelling_product, exact_row_counts
from kvstore_engine_adapter.kv_dtype import TORCH_DTYPES
from kvstore_engine_adapter.llama import LlamaModel
from kvstore_engine_adapter.model import load_model
from kvstore_engine_adapter.model_config import RopeConfig
from kvstore_engine_adapter.native_library import load_library
from kvstore_engine_adapter.page_pool import PagePool
from tests.engine.conftest import CPU
from tests.engine.tiny_model import HEAD_DIM, HEADS, KV_HEADS, LAYERS, TinyModel, reference_logits

SEQUENCES = 8

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Runner:
    """A forward model with pages in shuffled order."""

    def __init__(self, model, *, block_tokens=16, dtype="float32", folder=None):
        self.block_tokens = block_tokens
        self.model = LlamaModel(model.config, model.weights, max_tokens=512)
        self.model.prepare(max_rows=512, max_head_rows=16)
        pages = SEQUENCES * 512 // block_tokens
        self.pool = PagePool(KVLayout(dtype, LAYERS, block_tokens, KV_HEADS, HEAD_DIM), pages, CPU)
        self.ops = page_ops_for(self.pool, num_heads=HEADS, folder=folder)
        self.ops.prepare()
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).tolist()
        self.slots_of = [order[n::SEQUENCES] for n in range(SEQUENCES)]
        self.slots = self.slots_of[0]

    def run(self, *segments):
        """Logits of the last row of each segment, computed in one pass."""
        hidden = self.model.run(self.model.batch(segments, self.ops.begin(segments)))
        last = torch.tensor([len(segment.tokens) for segment in segments]).cumsum(0) - 1
        return self.model.logits(hidden[last])

    def segment(self, tokens, start, sequence=0):
        return Segment(tokens, start, self.slots_of[sequence])

    def prefill(self, tokens, start=0):
        return self.run(self.segment(tokens[start:], start))[0]

    def decode(self, tokens, start):
        logits = None
        for position in range(start, len(tokens)):
            logits = self.run(self.segment([tokens[position]], position))[0]
        return logits

    def forget_after(self, blocks):
        for slot in self.slots[blocks:]:
            self.pool.tensor[slot] = 0


@pytest.fixture(scope="session", params=["torch", "compiled"])
def folder(request, tmp_path_factory):
    """Where attention is compiled to; None: torch's is used."""
    if request.param == "torch":
        return None
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    return tmp_path_factory.getbasetemp() / "compiled"


def some_tokens(count, vocab=300):
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_paged_logits_match_the_contiguous_reference(tmp_path, folder, architecture, count):
    tiny = TinyModel(architecture, is_tied=False)
    model = load_model(tiny.write_folder(tmp_path / "m"), dtype=torch.float32, device=CPU)
    tokens = some_tokens(count)
    wanted = reference_logits(tiny, tokens, model.config.rope.inverse_frequencies(HEAD_DIM))[-1]
    # float32 against float64 through three layers: 1e-4 is a hundred roundings.
    torch.testing.assert_close(
        Runner(model, folder=folder).prefill(tokens).double(), wanted, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("scaling", [LLAMA3, {"type": "linear", "factor": 2.0}])
def test_rope_scaling_matches_the_reference(tmp_path, scaling):
    tiny = TinyModel(rope_scaling=scaling)
    model = load_model(tiny.write_folder(tmp_path / "m"), dtype=torch.float32, device=CPU)
    tokens = some_tokens(150)
    wanted = reference_logits(tiny, tokens, model.config.rope.inverse_frequencies(HEAD_DIM))[-1]
    plain = reference_logits(tiny, tokens, RopeConfig(10000.0).inverse_frequencies(HEAD_DIM))[-1]
    found = Runner(model).prefill(tokens).double()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 0.01


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones():
    rope = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)
    plain = RopeConfig(10000.0).inverse_frequencies(HEAD_DIM)
    scaled = rope.inverse_frequencies(HEAD_DIM)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    assert ((scaled <= plain) & (scaled >= plain / 8)).all()


def test_every_rope_parameter_is_in_its_description():
    ropes = [
        RopeConfig(10000.0),
        RopeConfig(20000.0),
        RopeConfig(10000.0, "linear", 2.0),
        RopeConfig(10000.0, "linear", 4.0),
        RopeConfig(10000.0, frequency_factors=(1.0, 2.0)),
    ]
    assert len({rope.describe() for rope in ropes}) == len(ropes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("block_tokens", [16, 24, 128])
def test_logits_are_equal_to_the_bit_however_many_blocks_are_reused(tiny_gguf, folder, dtype, block_tokens):
    model = runner_model(tiny_gguf, dtype)
    runner = Runner(model, block_tokens=block_tokens, dtype=dtype, folder=folder)
    tokens = some_tokens(397)
    cold = runner.prefill(tokens)
    for blocks in range(1, 397 // block_tokens + 1):
        runner.forget_after(blocks)
        assert torch.equal(runner.prefill(tokens, blocks * block_tokens), cold), f"{blocks} blocks reused"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_that_decoding_filled_are_equal_to_prefilled_ones(tiny_bf16, tiny_f32, folder, dtype):
    runner = Runner(tiny_bf16 if dtype == "bfloat16" else tiny_f32, dtype=dtype, folder=folder)
    tokens = some_tokens(200)
    cold, pages = runner.prefill(tokens), runner.pool.tensor.clone()
    runner.forget_after(3)
    assert torch.equal(runner.decode(tokens, 48), cold)
    assert torch.equal(runner.pool.tensor, pages)


def test_stale_bytes_beyond_the_sequence_change_nothing(tiny_bf16, folder):
    runner = Runner(tiny_bf16, dtype="bfloat16", folder=folder)
    tokens = some_tokens(70)
    cold = runner.prefill(tokens)
    runner.pool.tensor[runner.slots[4], :, :, 6:] = 7.0
    assert torch.equal(runner.decode([*tokens[:-1], tokens[-1]], 69), cold)


def first_three_segments(runner, tokens):
    """Sequences that end in different places: two that decode, and one whose prompt is cut anywhere."""
    runner.run(runner.segment(tokens[0][:-1], 0, 0))
    runner.run(runner.segment(tokens[1][:-1], 0, 1))
    runner.run(runner.segment(tokens[2][:37], 0, 2))
    return [
        runner.segment(tokens[0][-1:], len(tokens[0]) - 1, 0),
        runner.segment(tokens[1][-1:], len(tokens[1]) - 1, 1),
        runner.segment(tokens[2][37:], 37, 2),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0,), (1,), (2,), (2, 1)])
def test_logits_are_equal_to_the_bit_whatever_is_computed_beside_them(tiny_gguf, folder, dtype, order):
    runner = Runner(runner_model(tiny_gguf, dtype), dtype=dtype, folder=folder)
    counts = [64, 201, 130]
    segments = first_three_segments(runner, [some_tokens(count) for count in counts])
    found = runner.run(*(segments[n] for n in order))
    for logits, n in zip(found, order, strict=True):
        alone = logits_alone(tiny_gguf, dtype, folder, counts[n])
        assert torch.equal(logits, alone), f"sequence {n} in {order}"


@functools.cache
def runner_model(path, dtype):
    return load_model(path, dtype=TORCH_DTYPES[dtype], device=CPU)


@functools.cache
def logits_alone(path, dtype, folder, count):
    """Logits of a prefill in pages of its own; with the same arguments they are computed once."""
    return Runner(runner_model(path, dtype), dtype=dtype, folder=folder).prefill(some_tokens(count))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eight_sequences_decode_together_as_each_would_alone(tiny_gguf, folder, dtype):
    model = runner_model(tiny_gguf, dtype)
    together, alone = Runner(model, dtype=dtype, folder=folder), Runner(model, dtype=dtype, folder=folder)
    tokens = [some_tokens(30 + 31 * n) for n in range(SEQUENCES)]
    starts = [20 + 31 * n for n in range(SEQUENCES)]
    for n, start in enumerate(starts):
        together.run(together.segment(tokens[n][:start], 0, n))
    for step in range(10):
        segments = [
            together.segment([tokens[n][start + step]], start + step, n) for n, start in enumerate(starts)
        ]
        found = together.run(*segments)
    for n in range(SEQUENCES):
        assert torch.equal(found[n], alone.prefill(tokens[n])), f"sequence {n}"


def test_one_pass_may_hold_several_segments_of_a_sequence(tiny_bf16, folder):
    runner = Runner(tiny_bf16, dtype="bfloat16", folder=folder)
    tokens = some_tokens(200)
    cold = runner.prefill(tokens)
    runner.forget_after(0)
    found = runner.run(*(runner.segment(tokens[at : at + 50], at) for at in range(0, 200, 50)))
    assert torch.equal(found[-1], cold)


def test_a_row_count_of_attention_that_gives_other_bits_is_left_out(tiny_f32, monkeypatch):
    class Uneven(TorchPageOps):
        def _mix(self, queries, keys, values, mask):
            mixed = super()._mix(queries, keys, values, mask)
            return mixed * (1 + 1e-6) if len(queries) in (2, 16) else mixed

    pool = PagePool(KVLayout("float32", LAYERS, 16, KV_HEADS, HEAD_DIM), 4, CPU)
    ops = Uneven(pool, num_heads=HEADS)
    ops.prepare()
    assert not {2, 16} & set(ops.ladder)
    assert ops.ladder[-1] == 64


def test_a_row_count_of_products_that_gives_other_bits_is_left_out(tiny_bf16, monkeypatch):
    exact = torch.nn.functional.linear

    def uneven(rows, *rest):
        found = exact(rows, *rest)
        return found * (1 + 2**-7) if len(rows) in (4, 20) else found

    model = LlamaModel(tiny_bf16.config, tiny_bf16.weights, max_tokens=64)
    monkeypatch.setattr(torch.nn.functional, "linear", uneven)
    model.prepare(max_rows=32, max_head_rows=4)
    assert not {4, 20} & set(model.row_ladder)
    assert not {4, 20} & set(model.head_ladder)
    assert model.max_rows == 64


def test_attention_is_compiled_where_it_can_be(folder, tiny_bf16):
    runner = Runner(tiny_bf16, dtype="bfloat16", folder=folder)
    assert isinstance(runner.ops, TorchPageOps if folder is None else CpuPageOps)


def test_compiled_attention_is_the_same_with_several_threads(tiny_bf16, folder):
    tokens = [some_tokens(20 + 30 * n) for n in range(SEQUENCES)]
    one = Runner(tiny_bf16, dtype="bfloat16", folder=folder)
    torch.set_num_threads(3)
    try:
        three = Runner(tiny_bf16, dtype="bfloat16", folder=folder)
    finally:
        torch.set_num_threads(1)
    segments = [one.segment(each, 0, n) for n, each in enumerate(tokens)]
    for start in range(0, SEQUENCES, 2):
        assert torch.equal(one.run(*segments[start : start + 2]), three.run(*segments[start : start + 2]))
    three.ops.close()


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_attention_of_every_head_size_is_that_of_float64(folder, head_dim, dtype):
    pool = PagePool(KVLayout(dtype, 1, 24, 2, head_dim), 12, CPU)
    generator = torch.Generator().manual_seed(head_dim)
    pool.tensor[:12] = torch.randn(pool.tensor[:12].shape, generator=generator).to(pool.tensor.dtype)
    ops = page_ops_for(pool, num_heads=6, folder=folder)
    ops.prepare()
    segments = [Segment([0] * 70, 100, [5, 3, 7, 1, 0, 2, 4, 6]), Segment([0], 40, [8, 9])]
    queries = torch.randn(71, 6, head_dim, generator=generator).to(pool.tensor.dtype)
    found = ops.begin(segments).attend(0, queries)
    # Weights and sums of 170 terms are float32 (1e-6), results are rounded to the dtype: two roundings.
    tolerance = 1e-6 + 2 * torch.finfo(pool.tensor.dtype).eps
    torch.testing.assert_close(
        found.double(), reference_attention(pool, segments, queries), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_attention_over_pages_of_fp8_is_that_of_the_numbers_they_hold(folder, head_dim, dtype):
    computes_in = TORCH_DTYPES[dtype]
    layout = KVLayout("float8_e4m3", 1, 24, 2, head_dim)
    generator = torch.Generator().manual_seed(head_dim)
    # Every number that there is, but for NaN.
    held = torch.randint(0, 127, (12, 1, 2, 24, 2, head_dim), generator=generator, dtype=torch.uint8)
    held |= torch.randint(0, 2, held.shape, generator=generator, dtype=torch.uint8) << 7
    some = torch.randn(
        held[:, 0, 0].shape, generator=generator
    )  # keys: of scores that are far apart one wins
    held[:, 0, 0] = some.to(torch.float8_e4m3fn).view(torch.uint8)
    segments = [Segment([0] * 70, 100, [5, 3, 7, 1, 0, 2, 4, 6]), Segment([0], 40, [8, 9])]
    queries = torch.randn(71, 6, head_dim, generator=generator).to(computes_in)
    for place in (folder, None):
        pool = PagePool(layout, 12, CPU, computes_in=computes_in)
        pool.tensor.view(torch.uint8)[:12] = held
        ops = page_ops_for(pool, num_heads=6, folder=place)
        ops.prepare()
        found = ops.begin(segments).attend(0, queries)
        wanted = reference_attention(pool, segments, queries)
        # torch keeps weights in the dtype, and values are up to 448.
        tolerance = 2 * torch.finfo(computes_in).eps
        assert (found.double() - wanted).abs().max() <= 448 * tolerance + 1e-3
        assert found.dtype == computes_in


def test_what_is_written_to_pages_of_fp8_is_rounded_to_nearest_and_bounded():
    pool = PagePool(KVLayout("float8_e4m3", 1, 4, 1, 4), 1, CPU, computes_in=torch.bfloat16)
    new = torch.tensor([1.0, 1.05, 1000.0, -0.0015]).to(torch.bfloat16).view(1, 1, 4)
    pool.write(0, new, -new, pages=torch.tensor([0]), rows=torch.tensor([2]))
    keys, values = pool.read(0, torch.tensor([0]))
    assert keys[2, 0].tolist() == [1.0, 1.0, 448.0, -(2.0**-9)]
    assert torch.equal(values, -keys)
    assert not keys[[0, 1, 3]].any()


def reference_attention(pool, segments, queries):
    rows = []
    for segment in segments:
        for position in range(segment.start, segment.start + len(segment.tokens)):
            query = queries[len(rows)].double().view(2, 3, -1)
            keys, values = (
                part[: position + 1].double() for part in pool.read(0, torch.tensor(segment.slots))
            )
            scores = torch.einsum("hgd,khd->hgk", query, keys) * query.shape[-1] ** -0.5
            rows.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), values).flatten())
    return torch.stack(rows)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, tiny_bf16, caplog):
    tmp_path.chmod(0o777)
    runner = Runner(tiny_bf16, dtype="bfloat16", folder=tmp_path)
    assert isinstance(runner.ops, TorchPageOps)
    assert "others may write to it" in caplog.text


def test_without_a_compiler_attention_is_torchs(tmp_path, tiny_bf16, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert isinstance(Runner(tiny_bf16, dtype="bfloat16", folder=tmp_path / "c").ops, TorchPageOps)


def test_source_that_does_not_compile_is_passed_over(tmp_path, caplog):
    source = tmp_path / "broken.cpp"
    source.write_text("this is no C++")
    assert load_library(source, tmp_path / "c") is None
    assert "cannot be compiled" in caplog.text
    assert list((tmp_path / "c").iterdir()) == []


def test_terms_that_cancel_leave_rounding_errors_that_show_their_order():
    left, right = cancelling_product(8, torch.empty(48, 101, dtype=torch.bfloat16), torch.Generator())
    assert not (left.double() @ right.double().T).any()
    forwards, backwards = left.float() @ right.float().T, left.flip(1).float() @ right.flip(1).float().T
    assert (forwards != backwards).float().mean() > 0.25


def test_rows_that_depend_on_their_place_are_found_out():
    def compute(index):
        return index + (torch.arange(len(index)) == 3)

    assert exact_row_counts(compute, 8, [1, 2, 3, 4, 8]) == []
    assert exact_row_counts(lambda index: index * 2, 8, [1, 2, 3, 4, 16]) == [1, 2, 3, 4, 16]


def test_pages_travel_through_host_buffers_unchanged(tiny_bf16):
    runner = Runner(tiny_bf16, dtype="bfloat16")
    runner.prefill(some_tokens(64))
    before = runner.pool.tensor.clone()
    buffers = [memoryview(bytearray(runner.pool.page_bytes)) for _ in range(2)]
    slots = runner.slots[:2]
    runner.pool.gather(slots, buffers)
    runner.pool.clear(slots)
    runner.pool.scatter(slots, buffers)
    assert torch.equal(runner.pool.tensor, before)
    views = runner.pool.host_views(slots)
    assert views is not None
    assert [bytes(view) for view in views] == [bytes(buffer) for buffer in buffers]
