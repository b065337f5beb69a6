"""A text model with one text and one target: what the methods ask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attrace.capture.encoding import Encoding
from attrace.capture.huggingface import Loaded, clear_errors
from attrace.capture.targets import (
    Question,
    class_question,
    first_token_question,
    mask_question,
    token_question,
    vector_question,
)
from attrace.capture.torch_recorder import recording
from attrace.capture.trace import Trace
from attrace.errors import CaptureError, InputError, NonFiniteError, ShapeError
from attrace.types import Floats, Progress

TOKENS_AT_ONCE = 8192
"""Tokens of one batched forward pass when parts of the input are removed."""
LOGITS_AT_ONCE = 1 << 26
"""Numbers that a language model may give back at once: 256 MiB of float32."""
OPERATORS = ("delete", "hide")


class SideBySide:
    """A trace of an encoder-decoder, asked as if the text's tokens and then the decoder's were one stream."""

    def __init__(self, trace: Trace, length: int) -> None:
        self._trace = trace
        self._length = length
        self._source, self._decoder = trace.ops[0].queries, trace.ops[-1].queries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)

    def contributions(self) -> SideBySide:
        return SideBySide(self._trace.contributions(), self._length)

    def rollout(self, *, target: Any = None, source: int | None = None, **options: Any) -> Tensor:
        """`target` (N,) weighs the decoder's positions, after the text's -> (1, N); `source` is one position."""
        n = self._length
        if source is None:
            found = self._trace.rollout(target=(self._decoder, target[n:]), **options)
        else:
            side = (self._source, source) if source < n else (self._decoder, source - n)
            found = self._trace.rollout(source=side, **options)
        some = next(iter(found.values()))
        lengths = self._trace.streams
        parts = [found.get(s, some.new_zeros(len(some), lengths[s])) for s in (self._source, self._decoder)]
        return torch.cat(parts, dim=-1)


@dataclass(eq=False)
class TextSubject:
    """A model, an encoded text and a target; implements `attrace.types.Subject`."""

    loaded: Loaded
    encoding: Encoding
    question: Question
    trace: Trace | SideBySide
    readout: Floats
    protected: NDArray[np.bool_]

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def task(self) -> str:
        return self.loaded.task

    @property
    def width(self) -> int:
        """Of the vectors that contributions are made of."""
        return int(self.loaded.model.get_input_embeddings().embedding_dim)

    @property
    def parameters(self) -> int:
        """Those that work on every token: the embedding table only where it is the output head as well."""
        model = self.loaded.model
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        counted = sum(p.numel() for p in model.parameters() if p is not table)
        return int(counted + (table.numel() if head is not None and head.weight is table else 0))

    @property
    def settings(self) -> dict[str, Any]:
        """What it ran on, as JSON values."""
        model = self.loaded.model
        return {
            "backend": str(getattr(model.config, "_attn_implementation", "")),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "packages": ("torch", "transformers"),
        }

    @property
    def remarks(self) -> list[str]:
        """What the reader must know of model and text."""
        notes = []
        unknown = int(self.encoding.ids.eq(self.loaded.tokenizer.unk_token_id or -1).sum())
        if unknown:
            notes.append(f"{unknown} tokens are unknown to the model's vocabulary: it cannot tell them apart.")
        return notes

    @property
    def unit(self) -> str:
        """What `score` gives."""
        if self.loaded.task == "encoder":
            return "cosine similarity"
        if not self.question.predictions:
            return "output"
        return "log-odds" if self.question.rival is not None else "log-probability"

    def score(self, keep: NDArray[np.bool_], *, operator: str = "delete", progress: Progress | None = None) -> Floats:
        """The target's score with only the kept tokens: (m, n) -> (m,).

        Log-probability in nats; with a contrast, log p(A) - log p(B); for a vector, its cosine with the vector of
        the whole text; for a regression, the output.  `operator` "delete" takes the other tokens out of the
        sequence, "hide" leaves them in place and masks them from attention.  Protected tokens always stay.
        """
        if keep.ndim != 2 or keep.shape[1] != len(self.protected):
            raise ShapeError(f"Expected keep of shape (m, {len(self.protected)}). Received: {keep.shape}.")
        if operator not in OPERATORS:
            raise ValueError(f"Expected operator delete or hide. Received: {operator!r}.")
        kept = (keep | self.protected)[:, : self.question.length]
        values = np.zeros(len(kept))
        done = 0
        for rows in _equal_lengths(kept, operator, self._tokens_at_once()):
            values[rows] = self._scores(kept[rows], operator)
            done += len(rows)
            if progress is not None:
                progress("removing tokens", done, len(kept))
        return values

    def _tokens_at_once(self) -> int:
        task, config = self.loaded.task, self.loaded.model.config
        if task == "classifier" and config.pad_token_id is None:
            return 1  # a classifier that reads the last token refuses batches without a padding token
        if task in ("causal", "masked", "seq2seq"):
            vocabulary: int = config.get_text_config().vocab_size
            return max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // vocabulary))
        return TOKENS_AT_ONCE

    def _scores(self, kept: NDArray[np.bool_], operator: str) -> Floats:
        """For rows that keep equally many tokens (under "delete")."""
        device = self.encoding.ids.device
        mask = torch.as_tensor(kept, device=device)
        if not kept.any():
            batch, mask = self._nothing(len(kept)), mask[:, :1] | True
        elif operator == "delete":
            index = mask.nonzero()[:, 1].view(len(kept), -1)
            batch = {k: v[0][index] for k, v in self.encoding.inputs.items()}
        else:
            batch = {k: v[:, : kept.shape[1]].expand(len(kept), -1) for k, v in self.encoding.inputs.items()}
            batch["attention_mask"] = mask.long()
        if self.encoding.begun is not None:
            batch["decoder_input_ids"] = self.encoding.begun.expand(len(kept), -1)
        with torch.no_grad():
            output = run(self.loaded, batch)
        values: Floats = self._read(output, mask, operator).double().cpu().numpy()
        return values

    def _nothing(self, rows: int) -> dict[str, Tensor]:
        """What a model is shown when every token is gone: the beginning of a text."""
        tokenizer = self.loaded.tokenizer
        begin = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)
        if begin is None:
            raise InputError(
                f"Expected a token to stay, since {self.loaded.name} has no begin-of-text token. Received: a text of "
                "one token. Give a longer text, or another method."
            )
        ids = torch.full((rows, 1), begin, device=self.encoding.ids.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _read(self, output: Any, mask: Tensor, operator: str) -> Tensor:
        """The target's score of each row: (m,)."""
        question, task = self.question, self.loaded.task
        if task == "encoder":
            places = self._places(mask, operator)
            whole = _vectors(self.trace.output, None, self._places(mask[:1] | True, "hide"))
            kept = None if operator == "delete" else mask
            return torch.cosine_similarity(_vectors(output, kept, places), whole, dim=-1)
        logits: Tensor = output.logits.float()
        if task == "seq2seq":
            logits = logits[:, -1]
        elif task != "classifier":
            logits = logits[torch.arange(len(logits), device=logits.device), self._places(mask, operator)]
        answers = self._log_probabilities(logits)
        answer = answers[:, question.target.index]
        return answer if question.rival is None else answer - answers[:, question.rival]

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Of each class or token; the outputs themselves for a regression."""
        if self.loaded.task == "classifier":
            kind = getattr(self.loaded.model.config, "problem_type", None)
            if kind == "regression" or logits.shape[-1] == 1:
                return logits
            if kind == "multi_label_classification":
                return nn.functional.logsigmoid(logits)
        return logits.log_softmax(-1)

    def _places(self, mask: Tensor, operator: str) -> Tensor | None:
        """Where each row's output stands: (m,), or None where the input is pooled."""
        at = self.question.target.position
        if at is None:
            return None
        if self.loaded.task == "causal":  # the next token is read at the last one that stayed
            order = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            return mask.sum(1) - 1 if operator == "delete" else (mask * order).argmax(1)
        return mask[:, :at].sum(1) if operator == "delete" else torch.full_like(mask[:, 0], at, dtype=torch.long)


def run(loaded: Loaded, inputs: dict[str, Tensor]) -> Any:
    """The model's output, by name also where its configuration asks for tuples."""
    with clear_errors(loaded.name):
        return loaded.model(**inputs, return_dict=True)


def ask(loaded: Loaded, encoding: Encoding, target: str, *, detail: bool = False) -> TextSubject:
    """Run the model once on the text, recorded, and make the target exact.

    `detail` keeps what contribution methods need.  Raises TargetError for a target that the model does not have,
    CaptureError where no attention was seen, NonFiniteError where the model gives NaN (names layer and token).
    """
    given = dict(encoding.inputs)
    if encoding.begun is not None:
        given["decoder_input_ids"] = encoding.begun
    with torch.no_grad(), recording(loaded.model, values=detail, compiled=False) as trace:
        output = run(loaded, given)
    trace.check()
    _check_finite(loaded, encoding, trace, output)
    asked = trace if encoding.begun is None else SideBySide(trace, encoding.length)
    question = _question(loaded, encoding, output, target)
    protected = encoding.special.copy()
    protected[question.length :] = True  # a causal model does not see what comes after the target
    if question.target.position is not None and loaded.task != "causal":
        protected[question.target.position] = True
    return TextSubject(loaded, encoding, question, asked, _readout(loaded, encoding, question), protected)


def _question(loaded: Loaded, encoding: Encoding, output: Any, target: str) -> Question:
    if loaded.task == "classifier":
        return class_question(loaded, output.logits[0], target, len(encoding))
    if loaded.task == "causal":
        return token_question(loaded, output.logits[0], encoding, target)
    if loaded.task == "masked":
        return mask_question(loaded, output.logits[0], encoding, target)
    if loaded.task == "seq2seq":
        return first_token_question(loaded, output.logits[0], encoding, target)
    return vector_question(encoding, target)


def _readout(loaded: Loaded, encoding: Encoding, question: Question) -> Floats:
    """How the target reads the last layer's positions: (n,), summing to one."""
    n, at = len(encoding), question.target.position
    if encoding.begun is not None:
        at = n - 1
    if at is not None:
        one_hot: Floats = np.eye(n)[at]
        return one_hot
    if loaded.task == "encoder":
        return np.full(n, 1.0 / n)
    norms = _gradient_norms(loaded, encoding, question)
    if not np.isfinite(norms).all() or norms.sum() == 0:
        raise CaptureError(
            f"Expected the target {question.target.label!r} to depend on the last layer of {loaded.name}. "
            "Received: a gradient of zero or NaN at every position."
        )
    readout: Floats = norms / norms.sum()
    return readout


def _gradient_norms(loaded: Loaded, encoding: Encoding, question: Question) -> Floats:
    """Norms of d logit / d h_i at the last block's output, (n,); only the head is differentiated."""
    model = loaded.model
    block = last_block(model)
    leaves: list[Tensor] = []
    with torch.no_grad(), _leaf_at(block, leaves):
        logits = run(loaded, encoding.inputs).logits[0]
        target = logits[question.target.index]
        if question.rival is not None:
            target = target - logits[question.rival]
        (gradient,) = torch.autograd.grad(target, leaves[-1])
    norms: Floats = gradient[0].norm(dim=-1).double().cpu().numpy()
    return norms


@contextmanager
def _leaf_at(block: nn.Module, leaves: list[Tensor]) -> Iterator[None]:
    """Make the block's output a leaf that gradients start at; from there on the model is differentiated.

    The caller's no_grad block sets the grad mode back.
    """

    def cut(_module: nn.Module, _args: Any, output: Any) -> Any:
        hidden = (output[0] if isinstance(output, tuple) else output).detach().requires_grad_()
        leaves.append(hidden)
        torch.set_grad_enabled(True)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = block.register_forward_hook(cut)
    try:
        yield
    finally:
        handle.remove()
        torch.set_grad_enabled(False)


def last_block(model: nn.Module) -> nn.Module:
    """The last layer of the model's longest stack, of stacks that lie in no other."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    inner = {id(part) for stack in found for item in stack for part in item.modules()}
    stacks = [stack for stack in found if id(stack) not in inner]
    if not stacks:
        raise CaptureError(
            f"Expected a stack of layers in {type(model).__name__}. Received: no ModuleList. Trace the model with "
            "attrace.trace and name the row to start from: trace.rollout(target=...)."
        )
    longest = max(stacks, key=len)
    within = [m for m in longest[-1].modules() if isinstance(m, nn.ModuleList) and len(m)]
    return within[-1][-1] if len(longest) == 1 and within else longest[-1]  # ALBERT: a group of one layer


def _vectors(output: Any, mask: Tensor | None, places: Tensor | None) -> Tensor:
    """Mean over the kept positions, or the vector at a place: (m, d)."""
    hidden: Tensor = output.last_hidden_state.float()
    if places is not None:
        return hidden[torch.arange(len(hidden), device=hidden.device), places]
    if mask is None:
        return hidden.mean(1)
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def _equal_lengths(kept: NDArray[np.bool_], operator: str, tokens: int) -> Iterator[NDArray[np.intp]]:
    """Rows in batches that need no padding, each of at most as many tokens (or of one row)."""
    lengths = kept.sum(1) if operator == "delete" else np.full(len(kept), kept.shape[1])
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        size = max(1, tokens // max(1, int(length)))
        yield from np.split(rows, range(size, len(rows), size))


def _check_finite(loaded: Loaded, encoding: Encoding, trace: Trace, output: Any) -> None:
    result = output.last_hidden_state if loaded.task == "encoder" else output.logits
    # A fused kernel may hide NaN in a query: its output can be finite and the attention not.
    bad_rows = ((op, op.first_bad_row()) for op in trace.ops)
    found = next(((op, row) for op, row in bad_rows if row is not None), None)
    if found is None and bool(result.isfinite().all()):
        return
    bad = [name for name, p in loaded.model.named_parameters() if not bool(p.isfinite().all())]
    if found is not None:
        op, row = found
        if encoding.begun is not None and op.queries != trace.main:
            row = min(row + encoding.length, len(encoding) - 1)
        at = f"layer {op.layer} ({op.name}), token {row} ({encoding.pieces[row]!r})"
    else:
        at = _after_attention(loaded, encoding, result, bad)
    cause = f"the weights {', '.join(bad[:3])} hold NaN or infinity" if bad else "its weights are finite"
    raise NonFiniteError(
        f"Expected finite numbers from {loaded.name}. Received: NaN or infinity, first seen in {at}; {cause}. "
        "Give a sound copy of the model."
    )


def _after_attention(loaded: Loaded, encoding: Encoding, result: Tensor, bad: list[str]) -> str:
    """The place of NaN that no attention call has seen: in the last layer after its attention, or in the head."""
    hidden = result if result.ndim == 3 else run_body(loaded, encoding)
    rows = (~hidden[0].isfinite().all(-1)).nonzero()
    number = next((n for name in bad if (n := re.search(r"\.(\d+)\.", name))), None)
    if number is None and result.ndim == 2 and not len(rows):
        return "the head, after the last layer, for the whole text"
    layer = f"layer {number[1]}" if number else "the head, after the last layer"
    if not len(rows):
        return layer
    row = int(rows[0]) + (0 if encoding.begun is None else encoding.length)
    return f"{layer}, after its attention, token {row} ({encoding.pieces[row]!r})"


def run_body(loaded: Loaded, encoding: Encoding) -> Tensor:
    """The last hidden states, (1, n, d), of a model with a head."""
    with torch.no_grad(), clear_errors(loaded.name):
        hidden: Tensor = loaded.model.base_model(**encoding.inputs, return_dict=True).last_hidden_state
    return hidden
