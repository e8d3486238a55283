"""The whole model as a module: its parameters have their Hugging Face names."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import Config
from model.data import ModelInputs
from model.loss import Loss, token_loss
from model.modules.adapters import Embedding, Head, Node, TextBlock, VisionTower, recomputed
from model.moe import GROUPED_BYTES, Load, load_balance, refuse_widths, total_load
from model.rope import text_rope
from model.text import add_visual, labelled_rows, place_visual, rms_norm
from vlshard import Boundaries
from vlshard.storage import Parts


class Qwen3VLMoe(nn.Module):
    """The whole model: vision tower, hand-off, decoder and loss.

    ``state_dict()`` has the names and shapes of ``config.parameter_shapes()``. Parameters are
    not initialised. ``checkpoint_every`` says per site ("vision", "text") to recompute every so
    many blocks in backward; it may be replaced at any time.
    """

    def __init__(self, config: Config, checkpoint_every: Mapping[str, int] | None = None) -> None:
        super().__init__()
        refuse_expert_widths(config, torch.get_default_dtype())
        self.config = config
        self.checkpoint_every = dict(checkpoint_every or {})
        text = config.text
        layers = nn.ModuleList(TextBlock(text, i) for i in range(text.num_hidden_layers))
        decoder = Node(
            embed_tokens=Embedding(text), layers=layers, norm=Node(weight=(text.hidden_size,))
        )
        self.model = Node(visual=VisionTower(config.vision), language_model=decoder)
        self.lm_head = None if config.tie_word_embeddings else Head(text)

    def units(self) -> tuple[str, ...]:
        """Paths of the modules that FSDP wraps, children before parents, the root last."""
        return self.config.units()

    def forward(
        self,
        inputs: ModelInputs,
        at: Boundaries,
        aux_loss: bool = False,
        loss: Loss | None = None,
        *,
        micro_batches: int = 1,
        balances: list[Tensor] | None = None,
    ) -> Float[Tensor, ""]:
        """Loss term of this rank: its labelled rows' cross entropies over the number of labels.

        Args:
          inputs: what this rank holds of the micro-batch.
          at: where tensors travel.
          aux_loss: add the experts' load balance over all ranks' tokens of the micro-batch, times
            ``router_aux_loss_coef``.
          loss: computes the term in place of ``token_loss``, of the same tensors. It is a sum over
            rows, divided by ``num_labels``, and must be one where there is no row.
          micro_batches: of the step: the load balance counts for that part of it.
          balances: takes the load balance, detached; the same on every rank.
        Returns: 0-dim fp32; the sum over ranks and micro-batches is the loss.
        """
        rows, loads = self._labelled(inputs, at)
        text, loss = inputs.text, loss or partial(token_loss, at=at)
        if self.lm_head is None:
            term = loss(rows, self._head_weight, text.targets, text.num_labels)
        else:
            term = self.lm_head(rows, text.targets, text.num_labels, loss)
        if aux_loss and loads:
            total, ranks = total_load(loads, at=at)
            balance = load_balance([total])
            weight = self.config.text.router_aux_loss_coef / micro_batches
            term = term + weight * balance / ranks
            if balances is not None:
                balances.append(balance.detach())
        return term

    def logits(self, inputs: ModelInputs, at: Boundaries) -> Float[Tensor, "z vocab"]:
        """Logits of the labelled rows, for parameters that are not sharded.

        Args:
          inputs: what this rank holds of the micro-batch.
          at: where tensors travel.
        Returns: all at once, in the head's dtype. Of a vocabulary that ranks share they are this
          rank's columns, for the labelled rows of all of them.
        """
        return F.linear(self._labelled(inputs, at)[0], self._head_weight)

    @property
    def _head_weight(self) -> Tensor:
        owner = self.model.language_model.embed_tokens if self.lm_head is None else self.lm_head
        return owner.weight

    def _labelled(self, inputs: ModelInputs, at: Boundaries) -> tuple[Tensor, list[Load]]:
        """Normed states of the labelled rows, of all ranks that share the vocabulary, and loads."""
        decoder, config, text = self.model.language_model, self.config.text, inputs.text
        every = self.checkpoint_every.get("text", 0)
        x, levels = self._embed(inputs, at)
        rope = text_rope(text.positions, sections=config.mrope_section, theta=config.rope_theta)
        loads: list[Load] = []
        for i, layer in enumerate(decoder.layers):
            x, load = layer(x, rope, text.real, at, recomputed(i, every))
            loads += [] if load is None else [load]
            if i < len(levels):
                x = add_visual(x, levels[i], text.visual)
        rows = labelled_rows(x, text.labelled)
        rows = rms_norm(rows, decoder.norm.weight, eps=config.rms_norm_eps)
        return at.enter("text.vocab", rows), loads

    def _embed(self, inputs: ModelInputs, at: Boundaries) -> tuple[Tensor, Sequence[Tensor]]:
        """Tokens with visual tokens in their places, and the DeepStack levels to be added."""
        text, embed = inputs.text, self.model.language_model.embed_tokens
        if inputs.vision is None:
            return embed(text.ids, at), ()
        every = self.checkpoint_every.get("vision", 0)
        pending = at.start("vision.merged", self.model.visual(inputs.vision, at, every))
        embeds = embed(text.ids, at)
        merged, *levels = pending.wait().split(self.config.vision.out_hidden_size, dim=-1)
        return place_visual(embeds, merged, text.visual), levels


def refuse_expert_widths(config: Config, dtype: torch.dtype, parts: Parts | None = None) -> None:
    """Refuse a model whose experts the grouped matrix product cannot compute.

    Args:
      config: the model.
      dtype: what the experts are computed in.
      parts: the parameters that are cut for compute.
    Raises: ValueError naming the widths, and what cuts them.
    """
    text, cut = config.text, (parts or Parts()).layouts
    sparse = [layer for layer in range(text.num_hidden_layers) if text.is_sparse(layer)]
    if not sparse:
        return
    names = ("hidden_size", "moe_intermediate_size")
    refuse_widths({f"text_config.{name}": getattr(text, name) for name in names}, dtype)
    down = f"model.language_model.layers.{sparse[0]}.mlp.experts.down_proj"
    width = cut[down].local_shape(0)[-1] if down in cut else text.moe_intermediate_size
    size = width * dtype.itemsize
    if size % GROUPED_BYTES:
        raise ValueError(
            f"experts of moe_intermediate_size={text.moe_intermediate_size}, cut {cut[down].spec}, "
            f"have {width} columns on a rank: {size} bytes in {dtype}, and the grouped matrix "
            f"product needs multiples of {GROUPED_BYTES}"
        )
