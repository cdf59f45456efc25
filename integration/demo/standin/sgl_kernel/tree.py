"""Draft trees: slots seen while drafting, tree construction, greedy verification.

Node 0 of a tree is the root (the bonus token), nodes 1 .. draft_token_num - 1 are the selected
drafts. `retrive_index` [batch, draft_token_num] numbers the nodes of the whole batch;
`retrive_next_token` is a node's first child and `retrive_next_sibling` the next child of its
parent, -1 where there is none.
"""

import torch

FULL_MASK, QLEN_ONLY = 0, 1


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """Slot table of every draft branch, [batch * topk, max(seq_lens) + num_steps].

    A branch sees its request's committed slots followed by its own `num_steps` draft slots, which
    start `branch * num_steps` after the committed ones.
    """
    if seq_lens.numel() == 0:
        return req_to_token[:0]
    column = torch.arange(int(seq_lens.max()) + num_steps)
    skip = torch.arange(topk)[:, None] * num_steps
    position = column + skip * (column >= seq_lens[:, None, None])
    position = position.clamp(max=req_to_token.shape[1] - 1)
    return req_to_token[req_pool_indices[:, None, None], position].flatten(0, 1)


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links the selected drafts to a tree; writes mask, positions and the three `retrive_*` tables.

    `selected_index` [batch, draft_token_num - 1] names drafts by their place among all candidates,
    of which every expanded node has `topk`; `parent_list` gives the places of the expanded nodes,
    the root in column 0. `tree_mask` is flat [batch, draft_token_num, draft_token_num] bool: a node
    sees itself and its ancestors. In FULL_MASK mode a row is preceded by the request's
    `verified_seq_len` columns, which are left as they are. A draft whose parent was not selected
    stays unlinked.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            f"build_tree_kernel_efficient_cpu: tree_mask_mode={int(tree_mask_mode)} is not in the "
            f"CPU stand-in, only FULL_MASK ({FULL_MASK}) and QLEN_ONLY ({QLEN_ONLY})"
        )
    batch = verified_seq_len.numel()
    selected = selected_index.view(batch, draft_token_num - 1)
    group = selected // topk
    # a one-step tree comes with an empty parent_list: pad the root's column
    parents = parent_list if parent_list.numel() else torch.full((batch, 1), -1)
    is_parent = parents.gather(1, group)[:, :, None] == selected[:, None, :]
    parent = torch.where(group == 0, 0, _first(is_parent, offset=1))
    parent = torch.cat((torch.full((batch, 1), -1), parent), dim=1)

    node = torch.arange(draft_token_num)
    same_parent = (parent[:, :, None] == parent[:, None, :]) & (parent[:, :, None] >= 0)
    retrive_index.copy_(node + torch.arange(batch)[:, None] * draft_token_num)
    retrive_next_token.copy_(_first(parent[:, None, :] == node[:, None]))
    retrive_next_sibling.copy_(_first(same_parent & (node[:, None] < node)))

    visible = torch.zeros(batch, draft_token_num, draft_token_num, dtype=torch.bool)
    ancestor = node.expand(batch, -1)
    for _ in range(depth + 1):
        visible.scatter_(2, ancestor[:, :, None], True)
        ancestor = parent.gather(1, ancestor).clamp(min=0)
    prefix_lens = verified_seq_len.tolist() if tree_mask_mode == FULL_MASK else [0] * batch
    for rows, prefix in zip(visible, prefix_lens, strict=True):
        columns = prefix + draft_token_num
        tree_mask[: draft_token_num * columns].view(-1, columns)[:, prefix:] = rows
        tree_mask = tree_mask[draft_token_num * columns :]
    tree_depth = visible.sum(dim=2) - 1
    positions.copy_((verified_seq_len[:, None] + tree_depth).flatten())


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walks each tree from the root as long as a child holds the target's token.

    `candidates` and `target_predict` are [batch, draft_token_num]. Writes the walked nodes to
    `accept_index` [batch, max path] (the rest is left), their number without the root to
    `accept_token_num` [batch], and the target's token at each walked node to flat `predicts`.
    """
    batch, max_path = accept_index.shape
    target_predict = target_predict.view(batch, -1)
    trees = zip(
        candidates.tolist(),
        target_predict.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    for request, (drafts, wanted, first_child, next_sibling) in enumerate(trees):
        path = [0]
        while len(path) < max_path:
            child = first_child[path[-1]]
            while child != -1 and drafts[child] != wanted[path[-1]]:
                child = next_sibling[child]
            if child == -1:
                break
            path.append(child)
        nodes = retrive_index[request, path]
        accept_index[request, : len(path)] = nodes
        accept_token_num[request] = len(path) - 1
        predicts[nodes] = target_predict[request, path].to(predicts.dtype)


def _first(mask: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Index of the first True along the last dimension plus `offset`, -1 where there is none."""
    return torch.where(mask.any(-1), mask.int().argmax(-1) + offset, -1)
