"""An EAGLE 3.1 drafter written apart from the project: one slot, one step, one head at a time.

It takes a checkpoint's tensors by their names and follows the formulas literally, with Python loops
instead of packing, gathering and batched products. Slow, and the truth in the tests.
"""

import torch


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(head, position, theta):
    """Half-split RoPE of one head [d] by multiplying complex numbers."""
    half = head.shape[0] // 2
    frequency = theta ** (-torch.arange(half, dtype=head.dtype) / half)
    turned = torch.complex(head[:half], head[half:]) * torch.polar(torch.ones_like(frequency), position * frequency)
    return torch.cat([turned.real, turned.imag])


def weighted(scores, values):
    """Softmax of scores [rows] over as many values."""
    shares = torch.exp(scores - scores.max())
    shares = shares / shares.sum()
    return sum(share * value for share, value in zip(shares, values, strict=True))


class ReferenceDrafter:
    """weights: checkpoint tensors by name; embedding [V, D]."""

    def __init__(self, shape, weights, embedding):
        self.s, self.w, self.embedding = shape, weights, embedding

    def fused(self, aux):
        """aux [A, H] → g_0 [D]."""
        eps = self.s.rms_norm_eps
        if self.s.norm_before_fc:
            aux = norm(torch.cat(list(aux)), self.w["input_norm.weight"], eps).split(self.s.target_hidden_size)
        if self.s.fc_norm:
            aux = [norm(a, self.w[f"fc_norm.{i}.weight"], eps) for i, a in enumerate(aux)]
        return self.w["fc.weight"] @ torch.cat(list(aux))

    def of_layer(self, layer, name):
        """A weight of the first layer (0) or of one above it."""
        return self.w[f"layers.{layer}.{name}.weight" if layer else f"midlayer.{name}.weight"]

    def attention_weight(self, layer, name):
        return self.of_layer(layer, f"self_attn.{name}")

    def product(self, layer, name, x):
        """W · x, and the bias if the checkpoint has one."""
        bias = f"layers.{layer}.{name}.bias" if layer else f"midlayer.{name}.bias"
        return self.of_layer(layer, name) @ x + self.w.get(bias, 0)

    def heads(self, layer, name, x, position=None):
        """Project x into heads, normed with qk_norm and rotated if a position is given."""
        rows = self.product(layer, f"self_attn.{name}_proj", x).view(-1, self.s.head_dim)
        if position is None:
            return rows
        if self.s.qk_norm:
            weight = self.attention_weight(layer, f"{name}_norm")
            rows = [norm(row, weight, self.s.rms_norm_eps) for row in rows]
        return torch.stack([rotate(row, position, self.s.rope_theta) for row in rows])

    def row(self, layer, x, position):
        """What attention keeps of a position whose input is x: keys and values of every group."""
        return self.heads(layer, "k", x, position), self.heads(layer, "v", x)

    def attend(self, layer, x, position, rows):
        """What every head sees in the rows, end to end; of a window W, the last W."""
        queries, seen = self.heads(layer, "q", x, position), []
        unseen = max(len(rows) - (self.s.sliding_window or len(rows)), 0)
        for head, q in enumerate(queries):
            group = head // (self.s.num_attention_heads // self.s.num_key_value_heads)
            scores = torch.stack([q @ keys[group] for keys, _ in rows]) * self.s.head_dim**-0.5
            scores = torch.cat([torch.full_like(scores[:unseen], float("-inf")), scores[unseen:]])
            seen.append(weighted(scores, [values[group] for _, values in rows]))
        return torch.cat(seen)

    def layer_input(self, layer, token, g):
        eps = self.s.rms_norm_eps
        if layer:
            return norm(g, self.of_layer(layer, "input_layernorm"), eps), g
        e = norm(self.embedding[token], self.w["midlayer.input_layernorm.weight"], eps)
        n = norm(g, self.w["midlayer.hidden_norm.weight"], eps)
        return torch.cat([e, n]), n if self.s.norm_before_residual else g

    def context(self, tokens, aux, end):
        """For each layer, the rows of the first `end` positions of one document, as all slots behind them see them."""
        rows = [[] for _ in range(self.s.num_layers)]
        for p in range(end):
            self.through(tokens[p + 1], self.fused(aux[p]), p, rows, keys_only=True)
        return rows

    def slot(self, tokens, aux, t, steps, context=None):
        """The outputs z_0..z_{steps-1} of slot t of one document, each [D], and the states it read; `context`, of t
        positions or more, if it is there."""
        rows = [layer[:t] for layer in context or self.context(tokens, aux, t)]
        g, outputs, states = self.fused(aux[t]), [], []
        for k in range(steps):
            states.append(g)
            token = self.s.ptd_token_id if self.s.parallel and k else tokens[t + 1 + k]
            h = self.through(token, g, t + k, rows)
            z = norm(h, self.w["norm.weight"], self.s.rms_norm_eps)
            outputs.append(z)
            g = z if self.s.norm_output else h
            if self.s.parallel:
                g = self.fused(self.w["mask_hidden"].view(len(self.s.aux_layers), -1))
        return outputs, states

    def through(self, token, g, position, rows, keys_only=False):
        """One state through all layers, each of which keeps a row of it → h [D]; keys_only: nobody needs h."""
        for layer in range(self.s.num_layers):
            x, residual = self.layer_input(layer, token, g)
            rows[layer].append(self.row(layer, x, position))
            if keys_only and layer == self.s.num_layers - 1:
                return None
            u = residual + self.product(layer, "self_attn.o_proj", self.attend(layer, x, position, rows[layer]))
            n = norm(u, self.of_layer(layer, "post_attention_layernorm"), self.s.rms_norm_eps)
            gate = self.product(layer, "mlp.gate_proj", n)
            gate = gate * torch.sigmoid(gate) * self.product(layer, "mlp.up_proj", n)
            g = u + self.product(layer, "mlp.down_proj", gate)
        return g

    def loss(self, documents, steps, gamma, kept_ids, teacher, oov, cost):
        """The unrolled loss over documents, pair by pair, and counts per step by their names in MEASURES.

        teacher(y) → logits over the draft vocabulary; cost(p, log q) → the loss of a pair.
        """
        sums = [0] * steps
        counts = {name: [0] * steps for name in ("trained", "correct", "eligible", "prefix", "eligible_prefix")}
        kept = set(kept_ids)
        for d in documents:
            T, context = len(d.tokens), None
            for t in range(T):
                pairs = [k for k in range(steps) if t + 2 + k < T and d.loss_mask[t + 2 + k]]
                if not pairs:
                    continue
                context = context or self.context(d.tokens, d.all_aux, T - 1)
                zs, _ = self.slot(d.tokens, d.all_aux, t, max(pairs) + 1, context)
                correct = dict.fromkeys(pairs, False)
                for k in pairs:
                    top1 = int(d.top1[t + 1 + k])
                    if oov == "mask" and top1 not in kept:
                        continue
                    p = torch.softmax(teacher(d.all_last[t + 1 + k]), -1)
                    logits = self.w["lm_head.weight"] @ zs[k]
                    q = torch.log_softmax(logits, -1)
                    sums[k] = sums[k] + cost(p, q)
                    counts["trained"][k] += 1
                    correct[k] = kept_ids[int(logits.argmax())] == top1
                for k in pairs:
                    before = [correct.get(j) for j in range(k + 1)]  # None: not eligible
                    counts["eligible"][k] += 1
                    counts["correct"][k] += correct[k]
                    counts["eligible_prefix"][k] += None not in before
                    counts["prefix"][k] += all(before)
        total = sum(gamma**k * sums[k] / n for k, n in enumerate(counts["trained"]) if n)
        return total, counts


def dense_scores(q, k0, v0, own_k, own_v, layout, scale, window=None):
    """Every slot's scores over every key of the batch, and which it may see.

    Keys: the N step-0 keys, then the own keys of step 1 of all S slots, then those of step 2, …
    A window of W leaves a query at position p the keys of positions p - W + 1 to p.
    Returns scores [S, h, N + k*S], values [N + k*S, h, dv], seen [S, N + k*S] bool.
    """
    repeat = q.shape[1] // k0.shape[1]
    keys = torch.cat([k0, *own_k]).repeat_interleave(repeat, 1)
    values = torch.cat([v0, *own_v]).repeat_interleave(repeat, 1)
    seen = torch.zeros(len(q), len(keys), dtype=torch.bool, device=q.device)
    for slot, t in enumerate(layout.slots.tolist()):
        start = max(begin for begin, _ in layout.documents if begin <= t)
        query = t + len(own_k)
        reached = query + 1 - (window or query + 1)
        seen[slot, max(start, reached) : t + 1] = True
        for step in range(1, len(own_k) + 1):
            seen[slot, len(k0) + (step - 1) * len(q) + slot] = t + step >= reached
    return torch.einsum("shd,thd->sht", q, keys) * scale, values, seen


def dense_attention(q, k0, v0, own_k, own_v, layout, scale, window=None):
    """One softmax over all visible keys, differentiated by autograd: [S, h, dv]."""
    scores, values, seen = dense_scores(q, k0, v0, own_k, own_v, layout, scale, window)
    return torch.einsum("sht,thd->shd", scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1), values)
