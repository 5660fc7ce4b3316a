"""The module of a decoder: embedding, the layers of a pipeline stage, head and loss.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the last layer predict
further tokens.

Module d (1, 2, ...) takes, at position i, the hidden state of the module before (d = 1: of the last layer)
and the token i + d. The module normalises the state and the token's embedding, projects both together to H
features, and runs one layer; the model's head predicts token i + d + 1 from the normalised result. The host
shifts the tokens and hands them over as inputs, so that ranks may hold any positions.

Every rank holds the whole projection, whereas Megatron-Core splits the projection's columns over tp and
gathers the result (core/transformer/multi_token_prediction.py).

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, K modules.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from spbench.impls.attended import Attended
from spbench.impls.composition import Stage
from spbench.impls.kernels.cross_entropy import Autotuning, CrossEntropy, compiled_cross_entropy
from spbench.impls.kernels.fp8_projection import mark_recipe
from spbench.impls.kernels.host_copies import samples_begun
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE, mark_library
from spbench.impls.kernels.vocabulary_tiles import token_losses
from spbench.impls.models.blocks.adapters import freeze, with_gradient
from spbench.impls.models.blocks.architecture import Architecture
from spbench.impls.models.blocks.decoder_layer import DecoderBlock, make_norm
from spbench.impls.models.blocks.host_checkpoints import checkpoints_on_host
from spbench.impls.models.blocks.places import Places, places_in_documents
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.blocks.tiles import loss_in_tiles
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import Linear, full_precision


class Decoder(nn.Module):
    """The module of a pipeline stage, or of the whole model.

    ``forward(inputs, hidden)`` takes ``hidden`` [B, L, H] of the stage before (None on the first stage). It
    returns ``hidden`` [B, L, H] before the final norm; on the last stage also ``token_loss`` [B, L] and this
    rank's shares of ``language_loss``, of ``mtp_loss`` (with multi-token prediction) and of their sum
    ``loss``."""

    def __init__(self, model: Architecture, strategy: Strategy, seq_len: int, stage: Stage):
        super().__init__()
        self.model, self.strategy, self.seq_len, self.stage = model, strategy, seq_len, stage
        self.unbatched, self.attended = model.unbatched, model.attended(seq_len)
        strategy.pack(self.attended)
        rows = model.padded_vocabulary(strategy.vocabulary_parts)
        if stage.first or (stage.last and model.shares_embedding):  # the last stage's copy has the same name
            self.embedding = strategy.embedding(rows, model.hidden)
        self.positions = _learned_positions(model, seq_len) if stage.first else None
        self.loader_mask = _LoaderMask() if model.loader_mask and (stage.first or stage.last) else None
        layers = stage.layers(model.layers)
        self.blocks = nn.ModuleDict({str(i): DecoderBlock(model, strategy, i) for i in layers})
        self.runs = [([str(i) for i in run], again) for run, again in model.recomputed_runs(layers)]
        self.predictions = [str(i) for i in model.prediction_layers(stage)]
        for name in self.predictions:  # in ``blocks``, because backends gather these one by one
            self.blocks[name] = TokenPrediction(model, strategy, int(name))
        if stage.last:
            self.norm = make_norm(model)
            if not model.tied:
                self.head = strategy.vocabulary_parameter(rows, model.hidden)
        #: frozen originals of the tensors that are trained whole, by name; no computation reads the originals
        self.originals = nn.ParameterDict(
            {
                name: strategy.vocabulary_parameter(rows, model.hidden)
                for name in model.lora_whole
                if hasattr(self, name)
            }
        )
        self.scaling = model.delayed_scaling(self.blocks, strategy)
        freeze(self, model)
        self.on_host = checkpoints_on_host(model.checkpoints, model.checkpointed_angles * seq_len)
        #: whether the first micro-batch of a step casts weights to eight bits for all micro-batches
        self.casts_weights = model.fp8 != "none" and model.library == TRANSFORMER_ENGINE
        self._places: Places | None = None
        #: logits that live until the next micro-batch's, as in a variable of a training loop
        self._logits: Tensor | None = None
        self._way: str | CrossEntropy = model.cross_entropy
        if model.autotune_flush_kib:
            tuning = Autotuning(model.autotune_flush_kib * 2**10, model.autotune_copies)
            self._way = partial(compiled_cross_entropy, tuning=tuning)

    @property
    def tied(self) -> Tensor | None:
        """The word embedding [V, H] where the first and the last stage both hold and train the embedding."""
        if not self.model.shares_embedding or self.model.lora_rank:  # frozen copies have no gradient
            return None
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]
        return weight

    @property
    def head_weight(self) -> Tensor | None:
        """The weight [V, H] of the head, which only the last stage has."""
        weight = self.embedding.weight if self.model.tied else getattr(self, "head", None)
        return weight if self.stage.last else None  # type: ignore[return-value]

    def boundary_shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """The shape (B, L, H) of ``hidden``, which one pipeline stage sends to the next."""
        batch, length = inputs["tokens"].shape
        return batch, length, self.model.hidden

    def forward(self, inputs: Mapping[str, Tensor], hidden: Tensor | None = None) -> dict[str, Tensor]:
        # forward holds the mask to its end, as a training loop holds its data loader's batch
        mask = None if self.loader_mask is None else self.loader_mask(inputs["tokens"], self.seq_len)
        x = with_gradient(self._embedded(inputs["tokens"]), self.model) if hidden is None else hidden
        del hidden
        if self.scaling is not None:
            x = self.scaling.entering(x)
        places = self._places_like(x)
        if self.on_host is not None:
            self.on_host.begin()
        for names, again in self.runs:
            if again:
                how = self.model.recomputation
                x = recomputed(self._run, self.strategy.random, x, places, names, on_host=self.on_host, **how)
            else:
                x = self._run(x, places, names)
        outputs = {"hidden": x}
        if self.stage.last:
            further = self._further(x, inputs, places)
            outputs |= self._losses(x, inputs)
            if further:
                outputs |= self._further_losses(further, inputs, outputs["loss"])
        if self.scaling is not None:
            self.scaling.update(forward=True)
        del mask
        return outputs

    def _places_like(self, x: Tensor) -> Places:
        """The places of this rank's positions, for tensors like x: new ones for each forward, but one object
        for all forwards with a library other than torch."""
        if not self.model.fused:
            return Places(self.strategy, self.seq_len, x, self.attended)
        if self._places is None:
            self._places = Places(self.strategy, self.seq_len, x, self.attended)
        return self._places

    def _run(self, x: Tensor, places: Places, names: Sequence[str]) -> Tensor:
        for name in names:
            x = self.blocks[name](x, places)
        return x

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.model.embedding_scaled:
            x = x * self.model.hidden**0.5
        if self.positions is not None:
            whole = places_in_documents(self.seq_len, self.attended, tokens.device)
            x = x + self.positions(self.strategy.shard(whole, 0))
        return self.strategy.random.dropout(x, self.model.dropout, self.strategy.position_axes)

    def _further(self, x: Tensor, inputs: Mapping[str, Tensor], places: Places) -> list[Tensor]:
        """The normalised states [B, L, H] of each module of multi-token prediction, which the head takes."""
        results = []
        for place, name in enumerate(self.predictions):
            embedded = self.embedding(inputs["mtp_tokens"][..., place].contiguous())
            module = self.blocks[name]
            if self.model.recomputes_layers:
                how = self.model.recomputation
                taken = x, embedded, places
                x, normalised = recomputed(module, self.strategy.random, *taken, on_host=self.on_host, **how)
            else:
                x, normalised = module(x, embedded, places)
            results.append(normalised)
        return results

    def _losses(self, x: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        loss, token_loss = self._loss(self.norm(x), inputs["labels"], inputs["loss_weights"])
        return {"loss": loss, "language_loss": loss, "token_loss": token_loss}

    def _further_losses(
        self, further: list[Tensor], inputs: Mapping[str, Tensor], loss: Tensor
    ) -> dict[str, Tensor]:
        """``mtp_loss``, the weighted mean of multi-token prediction's losses, and ``loss`` + ``mtp_loss``."""
        labels, weights = (inputs[f"mtp_{name}"] for name in ("labels", "weights"))
        total = loss.new_zeros(())
        for place in reversed(range(len(further))):
            each, _ = self._loss(further.pop(), *(x[..., place].contiguous() for x in (labels, weights)))
            total = total + each * (self.model.mtp_weight / self.model.mtp_layers)
        return {"loss": loss + total, "mtp_loss": total}

    def _loss(self, x: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted loss of x [B, L, H], a scalar, and the loss of each token [B, L]."""
        weight = self.head_weight
        assert weight is not None
        if tiling := self.model.loss_tiling:
            return loss_in_tiles(self._token_loss, weight, x, labels, weights, tiling)
        token_loss = self._token_loss(x, weight, labels)
        if self.model.positions_read:
            samples_begun(torch.arange(labels.numel(), device=labels.device))
        return (token_loss * weights).sum(), token_loss

    def _token_loss(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        if rows := self.model.vocabulary_tile:
            return token_losses(x, weight, labels, rows)
        logits = self.strategy.vocabulary_logits(x, weight, None)
        if cap := self.model.logit_cap:
            logits = (logits / cap).tanh() * cap
        if (held := self.model.logits_held) != "none":
            self._logits = logits = full_precision(logits) if held == "float32" else logits
        if times := self.model.logits_read:
            logits = full_precision(logits)
            for _ in range(times):  # before the loss, which may work in their memory
                logits.detach().amax(-1)
        way, self._way = self._way, self.model.cross_entropy  # only the first call times its kernels
        return self.strategy.cross_entropy(logits, labels, way=way)


def _learned_positions(model: Architecture, seq_len: int) -> nn.Embedding | None:
    if model.learned_positions is None:
        return None
    return nn.Embedding(model.learned_positions, model.hidden)


class _LoaderMask(nn.Module):
    """The boolean mask [B, 1, L, L] of whole sequences, true where a query must not attend to a key. The
    mask has a module, so that meters of memory can name the mask."""

    def forward(self, tokens: Tensor, seq_len: int) -> Tensor:
        shape = len(tokens), 1, seq_len, seq_len
        return torch.ones(shape, dtype=torch.bool, device=tokens.device).triu_(1)


class TokenPrediction(nn.Module):
    """A module of multi-token prediction, which takes hidden states and embedded tokens, each [B, L, H], and
    returns new hidden states [B, L, H], and the same states normalised for the head."""

    def __init__(self, model: Architecture, strategy: Strategy, layer: int):
        super().__init__()
        self.hidden_norm, self.token_norm = make_norm(model), make_norm(model)
        self.project = Linear(2 * model.hidden, model.hidden, bias=False)
        self.block = DecoderBlock(model, strategy, layer)
        self.norm = make_norm(model)
        self.recipe = model.fp8_recipe
        mark_library(self, model.library)
        mark_recipe(self.project, self.recipe)

    def forward(self, hidden: Tensor, embedded: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        mark_recipe(self.project, self.recipe)
        both = torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), -1)
        x = self.block(self.project.project(both), places)
        return x, self.norm(x)


def shifted(x: Tensor, modules: int) -> Tensor:
    """x [B, L] shifted for each of K modules [B, L, K]: module d has at position i x of position i + d, and
    beyond the end the last x."""
    length = x.shape[1]
    places = torch.arange(length).unsqueeze(-1) + torch.arange(1, modules + 1)
    return x[:, places.clamp(max=length - 1)]


def shifted_inputs(
    tokens: Tensor, labels: Tensor, weights: Tensor, attended: Attended, modules: int
) -> dict[str, Tensor]:
    """The inputs ``mtp_tokens``, ``mtp_labels`` and ``mtp_weights`` [B, L, K] of the modules, shifted from a
    whole batch [B, L]. A weight is 0 where the token is of another document or beyond the sequence."""
    length = tokens.shape[1]
    ends = torch.tensor(attended.ends or (length,))
    positions = torch.arange(length)
    end = ends[torch.bucketize(positions, ends, right=True)].unsqueeze(-1)
    within = positions.unsqueeze(-1) + torch.arange(1, modules + 1) < end
    return {
        "mtp_tokens": shifted(tokens, modules),
        "mtp_labels": shifted(labels, modules),
        "mtp_weights": weights.unsqueeze(-1) * within,
    }
