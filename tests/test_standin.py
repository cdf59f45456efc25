"""The stand-in's operators against plain loops in fp64, and how it is loaded."""

from __future__ import annotations

import importlib.util
import inspect
import os
import random
import subprocess
import sys
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import torch.nn.functional as F

if torch.cuda.is_available():
    pytest.skip("the stand-in is for machines without a GPU", allow_module_level=True)
if importlib.util.find_spec("sglang") is None:
    pytest.skip("the stand-in serves SGLang, which is not installed", allow_module_level=True)

STANDIN = Path(__file__).resolve().parents[1] / "integration" / "demo" / "standin"
sys.path.insert(0, str(STANDIN))
import sgl_kernel  # noqa: E402

TRITON_RELEASE = version("sglang") == "0.5.12.post1"
SCALES = () if version("sglang").startswith("0.5.17") else (1.0, 1.0)
ALL = slice(None)
POOL_ROWS, MAX_CONTEXT, SLOTS = 12, 96, 700


class Pool:
    """A KV pool full of noise and requests whose positions lie on scattered slots."""

    def __init__(self, seq_lens: list[int], *, heads: int, kv_heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(len(seq_lens))
        self.generator, self.scale = generator, 0.2
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.keys = torch.randn(SLOTS, kv_heads, head_dim, generator=generator)
        self.values = torch.randn(SLOTS, kv_heads, head_dim, generator=generator)
        self.seq_lens = torch.tensor(seq_lens)
        self.rows = torch.randperm(POOL_ROWS, generator=generator)[: len(seq_lens)]
        self.req_to_token = torch.zeros(POOL_ROWS, MAX_CONTEXT, dtype=torch.int32)
        free = torch.randperm(SLOTS, generator=generator).int()
        for row, length in zip(self.rows, seq_lens, strict=True):
            self.req_to_token[row, :length], free = free[:length], free[length:]

    def queries(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.heads, self.head_dim, generator=self.generator)

    def dense(self, query: torch.Tensor, request: int, positions: list[int]) -> torch.Tensor:
        """One query row [heads, head_dim] over the named positions of one request, in fp64."""
        slots = [int(self.req_to_token[self.rows[request], p]) for p in positions]
        group = self.heads // self.kv_heads
        key, value = (
            torch.stack([pool[slot] for slot in slots], dim=1).double().repeat_interleave(group, 0)
            for pool in (self.keys, self.values)
        )
        rows = query.double()[:, None]
        return F.scaled_dot_product_attention(rows, key, value, scale=self.scale)[:, 0]

    def decode(self, query, key=None, value=None, loc=None, *, requests=ALL) -> torch.Tensor:
        output = torch.full_like(query, torch.nan)
        torch.ops.sgl_kernel.decode_attention_cpu(
            *(query, self.keys, self.values, *SCALES, output, key, value),
            *(torch.empty(0, dtype=torch.int64) if loc is None else loc, torch.empty(0)),
            *(self.req_to_token, self.rows[requests], self.seq_lens[requests]),
            *(self.scale, 0.0, False, 0, None, None),
        )
        return output

    def extend(self, query: torch.Tensor, lengths: list[int], tree_mask=None) -> torch.Tensor:
        output = torch.full_like(query, torch.nan)
        extend = torch.tensor(lengths, dtype=torch.int32)
        torch.ops.sgl_kernel.extend_attention_cpu(
            *(query, None, None, output, self.keys, self.values, *SCALES),
            *(self.req_to_token, self.rows, self.seq_lens, extend, extend.cumsum(0) - extend),
            *(max(lengths), self.scale, 0.0, False, 0, None, None, tree_mask),
        )
        return output


HEADS = [(4, 4, 16), (8, 2, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("seq_lens", [[1], [5, 40, 1, 17, 64, 33, 2]])
def test_decode_attention(seq_lens: list[int], heads: int, kv_heads: int, head_dim: int) -> None:
    pool = Pool(seq_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    query, batch = pool.queries(len(seq_lens)), len(seq_lens)
    key, value = torch.randn(2, batch, kv_heads * head_dim)
    loc = pool.req_to_token[pool.rows, pool.seq_lens - 1].long()
    keys, values = pool.keys.clone(), pool.values.clone()
    keys[loc], values[loc] = key.view(-1, *keys.shape[1:]), value.view(-1, *values.shape[1:])

    output = pool.decode(query, key, value, loc)

    assert torch.equal(pool.keys, keys) and torch.equal(pool.values, values)
    for i, length in enumerate(seq_lens):
        expected = pool.dense(query[i], i, list(range(length)))
        torch.testing.assert_close(output[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_decode_attention_does_not_depend_on_the_rest_of_the_batch() -> None:
    pool = Pool([5, 40, 1, 17, 64, 33, 2], heads=8, kv_heads=2, head_dim=64)
    query = pool.queries(7)
    together = pool.decode(query)
    for i in range(7):
        alone = pool.decode(query[i : i + 1], requests=slice(i, i + 1))
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [[3, 3, 3], [7, 1, 20], [4, 0, 2], [12, 9, 20]])
def test_extend_attention(lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> None:
    seq_lens = [12, 9, 20]
    pool = Pool(seq_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    query = pool.queries(sum(lengths))

    output = pool.extend(query, lengths)

    row = 0
    for i, (length, total) in enumerate(zip(lengths, seq_lens, strict=True)):
        for position in range(total - length, total):
            expected = pool.dense(query[row], i, list(range(position + 1)))
            torch.testing.assert_close(output[row].double(), expected, rtol=1e-5, atol=1e-6)
            row += 1


def test_extend_attention_sees_only_a_nodes_ancestors() -> None:
    parents = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 0, 4], [-1, 0, 0, 0, 3, 4]]
    nodes, seq_lens = 6, [6 + 11, 6 + 1, 6 + 30]
    pool = Pool(seq_lens, heads=8, kv_heads=2, head_dim=64)
    lineages = [[_lineage(tree, node) for node in range(nodes)] for tree in parents]
    mask = torch.zeros(len(parents), nodes, nodes, dtype=torch.bool)
    for i, tree in enumerate(lineages):
        for node, lineage in enumerate(tree):
            mask[i, node, lineage] = True
    query = pool.queries(len(parents) * nodes)

    output = pool.extend(query, [nodes] * len(parents), mask.flatten())

    for i, tree in enumerate(lineages):
        prefix = seq_lens[i] - nodes
        for node, lineage in enumerate(tree):
            positions = [*range(prefix), *(prefix + ancestor for ancestor in lineage)]
            expected = pool.dense(query[i * nodes + node], i, positions)
            actual = output[i * nodes + node].double()
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("k_scale", 0.5), ("logit_cap", 30.0), ("is_cross_attn", True), ("sliding_window", 128)],
)
def test_unsupported_attention_is_refused_by_name(name: str, value: object) -> None:
    pool = Pool([3], heads=4, kv_heads=4, head_dim=16)
    settings = dict(k_scale=1.0, v_scale=1.0, output=pool.queries(1), key=None, value=None)
    settings |= dict(loc=torch.empty(0), attn_logits=torch.empty(0), sm_scale=1.0, logit_cap=0.0)
    settings |= dict(is_cross_attn=False, sliding_window=0, encoder_lens=None, sinks=None)
    settings |= dict(req_to_token=pool.req_to_token, req_pool_indices=pool.rows)
    settings |= dict(query=pool.queries(1), k_cache=pool.keys, v_cache=pool.values)
    with pytest.raises(NotImplementedError, match=f"decode_attention_cpu: {name}="):
        sgl_kernel.attention.decode_attention_cpu(
            **{**settings, "seq_lens": pool.seq_lens, name: value}
        )


KERNELS = "sglang.srt.layers.attention.triton_ops"
against_its_kernels = pytest.mark.skipif(
    not TRITON_RELEASE or os.environ.get("TRITON_INTERPRET") != "1",
    reason="compares with the Triton kernels of SGLang 0.5.12.post1, which need TRITON_INTERPRET=1",
)


def _flat(pool: Pool, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_indptr and kv_indices of each request's first positions."""
    slots = [pool.req_to_token[row, :n] for row, n in zip(pool.rows, lengths, strict=True)]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), torch.cat(slots).long()


@against_its_kernels
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_decode_in_place_of_a_triton_kernel(heads: int, kv_heads: int, head_dim: int) -> None:
    from sgl_kernel import triton_release

    seq_lens = [5, 40, 1, 17]
    pool = Pool(seq_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    query, splits = pool.queries(4), 8
    outputs = torch.full((2, *query.shape), torch.nan)
    theirs = inspect.unwrap(resolve_name(f"{KERNELS}.decode_attention.decode_attention_fwd"))
    for attend, output in zip((triton_release.decode, theirs), outputs, strict=True):
        attend(
            *(query, pool.keys, pool.values, output, *_flat(pool, seq_lens)),
            torch.empty(4, heads, splits, head_dim),
            torch.empty(4, heads, splits),
            *(torch.full((4,), 2, dtype=torch.int32), splits, pool.scale, 1.0, 1.0),
            logit_cap=0.0,
        )
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


@against_its_kernels
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("lengths", [[3, 3, 3], [7, 1, 20]])
@pytest.mark.parametrize("masked", [False, True])
def test_extend_in_place_of_a_triton_kernel(
    masked: bool, lengths: list[int], heads: int, kv_heads: int, head_dim: int
) -> None:
    from sgl_kernel import triton_release

    prefix_lens = [9, 0, 21]
    pool = Pool(prefix_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    query = pool.queries(sum(lengths))
    key, value = torch.randn(2, sum(lengths), kv_heads, head_dim, generator=pool.generator)
    areas = [n * (n + prefix) for n, prefix in zip(lengths, prefix_lens, strict=True)]
    mask = torch.rand(sum(areas), generator=pool.generator) < 0.7
    for start, n, prefix in zip(accumulate([0, *areas]), lengths, prefix_lens, strict=False):
        tree = mask[start : start + n * (n + prefix)].view(n, -1)
        tree[:, prefix:].fill_diagonal_(True)  # else a row may see nothing
    outputs = torch.full((2, *query.shape), torch.nan)
    theirs = inspect.unwrap(resolve_name(f"{KERNELS}.extend_attention.extend_attention_fwd"))
    for attend, output in zip((triton_release.extend, theirs), outputs, strict=True):
        attend(
            *(query, key, value, output, pool.keys, pool.values),
            torch.tensor([0, *accumulate(lengths)]),
            *_flat(pool, prefix_lens),
            mask if masked else None,
            True,
            torch.tensor([0, *accumulate(areas)]) if masked else None,
            *(max(lengths), 1.0, 1.0, pool.scale),
        )
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("k_scale", 0.5), ("logit_cap", 30.0), ("sliding_window_size", 128)],
)
def test_unsupported_triton_attention_is_refused_by_name(name: str, value: object) -> None:
    from sgl_kernel import triton_release

    pool = Pool([3], heads=4, kv_heads=4, head_dim=16)
    settings = {"k_scale": 1.0, "v_scale": 1.0, name: value}
    with pytest.raises(NotImplementedError, match="extend_attention_fwd: "):
        triton_release.extend(
            *[pool.keys] * 6, *[pool.rows] * 3, None, True, None, 3, sm_scale=1.0, **settings
        )


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_slot_tables(index_dtype: torch.dtype) -> None:
    pool = Pool([20, 3, 50], heads=4, kv_heads=4, head_dim=16)
    rows = pool.rows.to(index_dtype)
    starts, ends = torch.tensor([[17, 3, 40], [20, 3, 45]]).to(index_dtype)
    spans = [(int(r), int(s), int(e)) for r, s, e in zip(rows, starts, ends, strict=True)]
    expected = torch.cat([pool.req_to_token[r, s:e] for r, s, e in spans]).long()

    gathered = torch.full((10,), -7)
    sgl_kernel.assign_extend_cache_locs_cpu(
        rows, pool.req_to_token, starts, ends, gathered, MAX_CONTEXT
    )
    assert torch.equal(gathered[:8], expected) and (gathered[8:] == -7).all()

    table, new = pool.req_to_token.clone(), torch.arange(900, 908)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, new, MAX_CONTEXT)
    wanted, taken = pool.req_to_token.clone(), 0
    for row, start, end in spans:
        wanted[row, start:end] = new[taken : taken + end - start]
        taken += end - start
    assert torch.equal(table, wanted)


@pytest.mark.parametrize("topk", [1, 2])
def test_draft_slots(topk: int) -> None:
    steps = 3
    pool = Pool([20, 3, 50], heads=4, kv_heads=4, head_dim=16)
    committed = torch.tensor([20, 3, 50]) - topk * steps + 3  # the last ones hold no prefix
    committed = committed.clamp(min=1)

    slots = torch.full((3 * topk * steps,), -7)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        pool.rows, pool.req_to_token, committed, slots, MAX_CONTEXT, topk, steps
    )
    table = sgl_kernel.build_draft_decode_metadata_cpu(
        pool.req_to_token, pool.rows, committed, topk, steps, MAX_CONTEXT
    )

    assert table.dtype == pool.req_to_token.dtype
    for i, (row, length) in enumerate(zip(pool.rows, committed.tolist(), strict=True)):
        own = pool.req_to_token[row, length : length + topk * steps].view(topk, steps)
        assert torch.equal(slots.view(3, topk, steps)[i], own.long())
        for branch in range(topk):
            seen = torch.cat((pool.req_to_token[row, :length], own[branch]))
            assert torch.equal(table[i * topk + branch, : length + steps], seen)


def test_kv_copy_reads_every_source_before_it_writes() -> None:
    buffers = [torch.randn(40, 2, 16), torch.randn(40, 2, 8).bfloat16()]
    source, target = torch.tensor([5, 6, 7, 30]), torch.tensor([6, 7, 5, 0])
    expected = [buffer.clone() for buffer in buffers]
    for before, buffer in zip(expected, buffers, strict=True):
        before[target] = buffer[source]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer[0].nbytes for buffer in buffers]),
        target,
        source,
    )
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


def test_bonus_tokens_and_accepted_slots() -> None:
    accept_index = torch.tensor([[0, 2, -1, -1], [4, 5, 6, 7], [8, -1, -1, -1]])
    accept_lens = torch.tensor([2, 4, 1], dtype=torch.int32)
    tokens = torch.arange(100, 112)
    bonus = torch.zeros(3, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, accept_lens, bonus, 4)
    assert bonus.tolist() == [101, 107, 108]

    packed = torch.full((12,), -7)
    sgl_kernel.fill_accept_out_cache_loc_cpu(accept_index, torch.arange(50, 62), packed)
    assert packed.tolist() == [50, 52, 54, 55, 56, 57, 58, *[-7] * 5]


@pytest.mark.parametrize("select_index", [None, [1, 0, 8]])
def test_rotate_input_ids(select_index: list[int] | None) -> None:
    starts, lengths = torch.tensor([0, 3, 3]), torch.tensor([3, 0, 6], dtype=torch.int32)
    ids, last = torch.arange(10, 20), torch.tensor([[91], [92], [93]])
    sgl_kernel.rotate_input_ids_cpu(
        ids, starts, lengths, last, None if select_index is None else torch.tensor(select_index)
    )
    first = [11, 12, 91] if select_index is None else [11, 91, 12]
    assert ids.tolist() == [*first, 14, 15, 16, 17, 18, 93, 19]


@pytest.mark.parametrize("page_size", [16, 64])
def test_page_allocation(page_size: int) -> None:
    from sgl_kernel.plugin import allocate_decode, allocate_extend

    prefix_lens, seq_lens = torch.tensor([[0, 5, page_size, 30, 7], [70, 5, page_size + 1, 95, 8]])
    pages = torch.randperm(40)
    tables = [torch.full((MAX_CONTEXT,), -1) for _ in prefix_lens]
    for table, length in zip(tables, prefix_lens.tolist(), strict=True):
        held, pages = pages[: -(-length // page_size)], pages[-(-length // page_size) :]
        slots = (held[:, None] * page_size + torch.arange(page_size)).flatten()
        table[:length] = slots[:length]
    last_loc = torch.stack([t[n - 1] for t, n in zip(tables, prefix_lens, strict=True)])
    out = torch.full((int((seq_lens - prefix_lens).sum()),), -7)

    allocate_extend(prefix_lens, seq_lens, last_loc, pages, out, 8, page_size)

    for table, start, end in zip(tables, prefix_lens.tolist(), seq_lens.tolist(), strict=True):
        table[start:end], out = out[: end - start], out[end - start :]
        expected_pages = table[:end:page_size] // page_size
        taken = -(-end // page_size) - -(-start // page_size)
        assert torch.equal(expected_pages[expected_pages.numel() - taken :], pages[:taken])
        pages = pages[taken:]
        slots = (expected_pages[:, None] * page_size + torch.arange(page_size)).flatten()
        assert torch.equal(table[:end], slots[:end])

    last = torch.stack([t[n - 1] for t, n in zip(tables, seq_lens, strict=True)])
    out = torch.full_like(seq_lens, -7)
    allocate_decode(seq_lens + 1, last, pages, out, 8, page_size)
    opened = iter((pages * page_size).tolist())
    starts = [
        next(opened) if n % page_size == 0 else int(s) + 1
        for n, s in zip(seq_lens, last, strict=True)
    ]
    assert out.tolist() == starts


def test_page_allocation_beyond_the_pool_writes_nothing() -> None:
    from sgl_kernel.plugin import allocate_extend

    out = torch.full((33,), -7)
    allocate_extend(
        *(
            torch.tensor([0]),
            torch.tensor([33]),
            torch.tensor([-1]),
            torch.tensor([4, 9]),
            out,
            1,
            16,
        )
    )
    assert (out == -7).all()


def _lineage(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors down to the root."""
    return [node] if node == 0 else [node, *_lineage(parents, parents[node])]


def _expand(topk: int, steps: int, nodes: int, rng: random.Random):
    """One request's EAGLE expansion: parent_list, selected candidates and each node's parent.

    Step 0 drafts `topk` candidates below the root; later steps draft `topk` below each of the
    `topk` best candidates of the step before. Candidates are numbered in that order.
    """
    score, parent_of = {-1: 1.0}, {}
    expanded, parent_list, first = [-1], [-1], 0
    for _ in range(steps):
        drafted = []
        for parent in expanded:
            for _ in range(topk):
                candidate = first + len(drafted)
                parent_of[candidate] = parent
                score[candidate] = score[parent] * rng.uniform(0.1, 0.95)
                drafted.append(candidate)
        first += len(drafted)
        expanded = sorted(drafted, key=score.__getitem__, reverse=True)[:topk]
        parent_list += expanded
    selected = sorted(sorted(parent_of, key=score.__getitem__, reverse=True)[: nodes - 1])
    node_of = {-1: 0, **{candidate: i + 1 for i, candidate in enumerate(selected)}}
    parents = [-1, *(node_of[parent_of[candidate]] for candidate in selected)]
    return parent_list[: 1 + topk * (steps - 1)], selected, parents


def _liked_child(parents: list[int], tokens: list[int], node: int, rng: random.Random) -> int:
    """The token of one of the node's children, or now and then of none."""
    children = [tokens[child] for child in range(1, len(parents)) if parents[child] == node]
    return rng.choice([*children, *children, 999])


TREES = [(1, 1, 2), (1, 3, 4), (2, 3, 6), (2, 2, 5), (4, 4, 16)]


@pytest.mark.parametrize(("topk", "steps", "nodes"), TREES)
def test_tree_construction(topk: int, steps: int, nodes: int) -> None:
    rng, batch = random.Random(topk), 5
    expansions = [_expand(topk, steps, nodes, rng) for _ in range(batch)]
    seq_lens = torch.tensor([rng.randrange(1, 50) for _ in range(batch)])
    mask = torch.ones(batch * nodes * nodes, dtype=torch.bool)
    positions = torch.full((batch * nodes,), -7)
    links = torch.full((3, batch, nodes), -1)
    parent_list = torch.tensor([expansion[0] for expansion in expansions])

    sgl_kernel.build_tree_kernel_efficient_cpu(
        parent_list if steps > 1 else parent_list[:, :0],
        torch.tensor([expansion[1] for expansion in expansions]),
        *(seq_lens, mask, positions, *links, topk, steps, nodes, 1),
    )

    assert links[0].flatten().tolist() == list(range(batch * nodes))
    for i, (_, _, parents) in enumerate(expansions):
        lineages = [_lineage(parents, node) for node in range(nodes)]
        expected_mask = [[j in lineage for j in range(nodes)] for lineage in lineages]
        assert mask.view(batch, nodes, nodes)[i].tolist() == expected_mask
        depths = [len(lineage) - 1 for lineage in lineages]
        assert (positions.view(batch, nodes)[i] - seq_lens[i]).tolist() == depths
        for node in range(nodes):
            children = [j for j in range(1, nodes) if parents[j] == node]
            chain = [*children, -1]
            assert links[1, i, node] == chain[0]
            assert [int(links[2, i, child]) for child in children] == chain[1:]


def test_a_tree_mask_over_the_whole_prefix() -> None:
    rng, seq_lens, nodes = random.Random(3), torch.tensor([5, 1, 12]), 6
    parent_list, selected, _ = zip(*(_expand(2, 3, nodes, rng) for _ in range(3)), strict=True)
    tree_only = torch.ones(3 * nodes * nodes, dtype=torch.bool)
    whole = torch.ones(nodes * int((seq_lens + nodes).sum()) + 7, dtype=torch.bool)
    for mode, mask in ((1, tree_only), (0, whole)):
        outputs = mask, torch.empty(3 * nodes, dtype=torch.int64), *torch.full((3, 3, nodes), -1)
        sgl_kernel.build_tree_kernel_efficient_cpu(
            *(torch.tensor(parent_list), torch.tensor(selected), seq_lens),
            *(*outputs, 2, 3, nodes, mode),
        )
    assert not tree_only.all()
    for prefix, tree in zip(seq_lens.tolist(), tree_only.view(3, nodes, nodes), strict=True):
        rows = whole[: nodes * (prefix + nodes)].view(nodes, -1)
        whole = whole[rows.numel() :]
        assert rows[:, :prefix].all() and torch.equal(rows[:, prefix:], tree)
    assert whole.all() and len(whole) == 7


def test_other_tree_masks_are_refused() -> None:
    one = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="efficient_cpu: tree_mask_mode=2"):
        sgl_kernel.build_tree_kernel_efficient_cpu(one, one, one[0], *[one] * 5, 1, 1, 2, 2)


@pytest.mark.parametrize(("topk", "steps", "nodes"), TREES)
def test_greedy_verification(topk: int, steps: int, nodes: int) -> None:
    rng, batch = random.Random(nodes), 40
    trees = [_expand(topk, steps, nodes, rng)[2] for _ in range(batch)]
    drafts = [rng.sample(range(100), nodes) for _ in range(batch)]
    targets = [
        [_liked_child(parents, draft, node, rng) for node in range(nodes)]
        for parents, draft in zip(trees, drafts, strict=True)
    ]
    links = torch.full((3, batch, nodes), -1)
    links[0] = torch.arange(batch * nodes).view(batch, nodes)
    for i, parents in enumerate(trees):
        for node in reversed(range(1, nodes)):
            links[2, i, node] = links[1, i, parents[node]]
            links[1, i, parents[node]] = node
    predicts = torch.full((batch * nodes,), -7, dtype=torch.int32)
    accept_index = torch.full((batch, steps + 1), -1, dtype=torch.int32)
    accept_token_num = torch.full((batch,), -7, dtype=torch.int32)

    sgl_kernel.verify_tree_greedy_cpu(
        *(predicts, accept_index, accept_token_num, torch.tensor(drafts), *links),
        torch.tensor(targets),
    )

    lengths = set()
    for i, (parents, draft, target) in enumerate(zip(trees, drafts, targets, strict=True)):
        right = [
            path
            for path in (_lineage(parents, node)[::-1] for node in range(nodes))
            if all(draft[child] == target[node] for node, child in pairwise(path))
        ]
        path = max(right, key=len)
        lengths.add(len(path))
        padding = [-1] * (steps + 1 - len(path))
        assert accept_index[i].tolist() == [*(i * nodes + node for node in path), *padding]
        assert accept_token_num[i] == len(path) - 1
        wanted = [target[node] if node in path else -7 for node in range(nodes)]
        assert predicts.view(batch, nodes)[i].tolist() == wanted
    assert len(lengths) > 1, "every tree was walked equally far: the case tests little"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    from fused_fallback.integration.demo.environment import Environment

    environment = Environment(version("sglang"), "cpu", Path(sys.executable)).env()
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_refused_where_cuda_is_available() -> None:
    done = _python("import torch; torch.cuda.is_available = lambda: True; import sgl_kernel")
    assert done.returncode == 1
    assert "ImportError: the CPU stand-in for sgl_kernel" in done.stderr
    assert "with a CUDA GPU" in done.stderr


def test_sglang_takes_torchvision_native_layers_and_the_repairs() -> None:
    done = _python(
        "import torch, torchvision\n"
        "from torchvision.io import decode_jpeg\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "from sglang.srt.utils import cpu_has_amx_support\n"
        "import sgl_kernel.plugin\n"
        "print(torchvision.__file__)\n"
        "print(cpu_has_amx_support(), hasattr(torch.ops.sgl_kernel, 'convert_weight_packed'))\n"
        "hooks = {hook.__module__ + '.' + hook.__name__\n"
        "         for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks}\n"
        "print(*sorted(h for h in hooks if h.startswith('sgl_kernel.')))\n"
        "print(all(target in HookRegistry._patched for target in HookRegistry._hooks))\n"
        "print('sglang.srt.mem_cache.allocation.get_last_loc' in HookRegistry._patched)\n"
    )
    assert done.returncode == 0, done.stderr
    torchvision, amx, repairs, patched, last_loc = done.stdout.splitlines()[-5:]
    assert STANDIN not in Path(torchvision).parents
    assert amx == "False False"
    expected = {
        "0.5.17": ["plugin.forward_decode", "plugin.forward_extend", "plugin.keep_intel_amx"],
        "0.5.12.post1": [
            f"triton_release.{name}"
            for name in ("apply_vocab_mask", "decode", "extend", "prefix_only", "slots", "verify")
        ],
    }
    names = expected.get(version("sglang"), [])
    assert repairs.split() == [f"sgl_kernel.{name}" for name in names]
    assert (patched, last_loc) == ("True", str(not TRITON_RELEASE))
