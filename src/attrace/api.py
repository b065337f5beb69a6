"""The main job, and the only place that joins the rooms."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrace.errors import InputError
from attrace.types import Attribution, Heads, Options, Progress, Scores, Sink, Token

if TYPE_CHECKING:
    from rich.console import Console

    from attrace.capture.huggingface import Loaded
    from attrace.capture.keras_text import KerasSubject
    from attrace.capture.text import TextSubject
    from attrace.render.scene import Units

    AnySubject = TextSubject | KerasSubject

LEAVE_ONE_OUT_LIMIT = 4e12
"""Multiply-adds that `auto` spends on leave-one-out: about half a minute on two CPU cores."""
LITTLE = 0.1
"""Share of the mass below which a picture of the text says that it shows little."""
ALTI_LIMIT = 2e11
"""The same for contributions, which are bound by memory and take about 20 seconds for as many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation(Attribution):
    """An attribution that can show and save itself."""

    def show(self, console: Console | None = None, *, top: int = 10, units: Units = "words") -> None:
        """Print it to the terminal (or the given rich console): prediction, coloured text, top words."""
        from rich.console import Console

        from attrace.render.terminal import TerminalView

        (console or Console()).print(TerminalView(self, top=top, units=units))

    def to_html(self, path: str | os.PathLike[str], *, top: int = 20, units: Units = "words") -> None:
        """Write one self-contained HTML file; it appears whole or not at all."""
        from attrace.render.files import write_text
        from attrace.render.html import to_html

        write_text(path, to_html(self, top=top, units=units))

    def to_dict(self) -> dict[str, Any]:
        """JSON values, after the schema "attrace.attribution/1" (docs/json.md)."""
        from attrace.render.record import to_dict

        return to_dict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, readable by `attrace.load`; the file appears whole or not at all."""
        from attrace.render.files import write_text
        from attrace.render.record import to_json

        write_text(path, to_json(self))


def load(path: str | os.PathLike[str]) -> Explanation:
    """Read what `Explanation.save` wrote.  Raises InputError for a file that is missing or of another form."""
    from attrace.render.record import from_json

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"Expected a JSON file that Explanation.save wrote. Received: {str(path)!r} ({error})."
        ) from None
    found = from_json(text)
    return Explanation(**{f.name: getattr(found, f.name) for f in fields(found)})


def method_names() -> tuple[str, ...]:
    """The methods that `explain` knows by name, besides "auto"."""
    from attrace.methods.registry import METHODS

    return tuple(METHODS)


def check_output(path: str | os.PathLike[str]) -> None:
    """Raise OutputError where a result could not be written; leaves nothing behind."""
    from attrace.render import files

    files.check_writable(path)


def explain(
    model: Any = None,
    inputs: str = "",
    *,
    processor: Any = None,
    target: str = "auto",
    method: str = "auto",
    layers: Sequence[int] | None = None,
    heads: Heads = "mean",
    residual: float = 0.5,
    discard: float = 0.0,
    truncate: bool = False,
    device: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Explanation:
    """Show which parts of a text a model's output drew on.

    Args:
        model: a local folder, a hub name, None for the classifier that the package carries, a transformers model
            object (then with its tokenizer as `processor`), or a Keras text classifier or causal language model; it is
            run as it is and nothing is changed on it.
        inputs: the text.
        processor: the tokenizer, where `model` is an object. For a Keras model what maps [text] to its inputs and gives
            tokens back: a KerasHub preprocessor, a TextVectorization layer, or a pair (function, vocabulary).
        target: "auto" (the predicted class, the next token, the first token that an encoder-decoder writes, the
            answer at the mask, the sentence vector),
            "class:LABEL", "class:INDEX", "next:TEXT", "token:POSITION", or a contrast "class:A~B", "next:A~B".
        method: one of `method_names()`, or "auto", what did best when the marked tokens were removed
            (benchmarks/faithfulness.py): for encoders contribution-weighted rollout ("alti"), plain rollout where
            the family is not known or the text long; for causal models, where rollout collapses onto the first
            token, leave-one-out, and the last layer's attention where the text is long.  Encoder-decoders have not
            been measured: leave-one-out, and rollout where the text is long.
        layers: layer numbers to use, all by default; negative ones count from the end.
        heads: how heads are fused: "mean", "max", "min", a head's index, or a weight per head.
        residual: share of each position that stays with itself in every layer, 0 to 1.
        discard: share of each layer's smallest weights that is set to zero, 0 to 1 (1 excluded).
        truncate: read only what fits where the text is longer than the model's context.
        device: "cpu" (the default), "cuda", ...; a model object stays where it is.
        seed: for models that draw random numbers; the caller's generators are left as they were.
        progress: called as progress(stage, done, total) during long work.

    Raises InputError, TargetError, TextTooLongError, ModelError, CaptureError, NonFiniteError; each message says
    what was expected, what came, and what to do.

    >>> import attrace
    >>> result = attrace.explain(None, "Claim your FREE prize now")
    >>> result.target.label
    'spam'

    """
    options = _options(method, heads, residual, discard, layers)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"Expected a seed from 0 to 2**63 - 1. Received: {seed!r}. Give a whole number.")
    from attrace.capture.seams import is_keras

    with nullcontext() if is_keras(model) else _on_own_terms(seed):
        subject: AnySubject
        if is_keras(model):
            subject = _keras_subject(model, inputs, processor, target=target, device=device, progress=progress)
        else:
            loaded = _loaded(model, processor, device, progress)
            from attrace.capture.encoding import encode
            from attrace.capture.text import ask

            encoding = encode(loaded, inputs, truncate=truncate)
            if progress is not None:
                progress("running the model", 0, 0)
            subject = ask(loaded, encoding, target, detail=method in ("auto", "alti"))
        name, sink, notes = _choose(method, subject, options)
        scores = _run(name, subject, options, progress)
    if scores.sink is None:
        scores = replace(scores, sink=sink)
    notes = [n for n in (subject.encoding.note, *notes, *_notes(name, target, subject, scores)) if n]
    return _join(subject, scores, name, tuple(notes), _settings(subject, options, name, seed))


def _options(method: str, heads: Heads, residual: float, discard: float, layers: Sequence[int] | None) -> Options:
    """The options in plain form.  What depends on the model (its layers, its heads) is checked against it later."""
    from attrace.methods.registry import method as find
    from attrace.ops.rollout.checks import check_discard, check_integers, check_residual

    if method != "auto":
        find(method)
    if hasattr(heads, "tolist"):
        heads = heads.tolist()
    if isinstance(heads, list | Iterator):
        heads = tuple(heads)
    elif not isinstance(heads, bool) and hasattr(heads, "__index__"):
        heads = operator.index(heads)
    return Options(
        heads=heads,
        residual=check_residual(residual),
        discard=check_discard(discard),
        layers=None if layers is None else tuple(check_integers("layers", layers)),
    )


def _keras_subject(
    model: Any, inputs: str, processor: Any, *, target: str, device: str | None, progress: Progress | None
) -> KerasSubject:
    from attrace.capture.keras_text import ask

    if device is not None:
        raise InputError("Expected a model object to stay on its device. Received: device=. Move it yourself.")
    if progress is not None:
        progress("running the model", 0, 0)
    return ask(model, processor, inputs, target)


def _loaded(model: Any, processor: Any, device: str | None, progress: Progress | None) -> Loaded:
    from attrace.capture import huggingface

    if model is None or isinstance(model, str | os.PathLike):
        if progress is not None:
            progress("loading the model", 0, 0)
        return huggingface.load(model, device=device)
    if device is not None:
        raise InputError("Expected a model object to stay on its device. Received: device=. Move it yourself.")
    return huggingface.adopt(model, processor)


Choice = tuple[str, "Sink | None", list[str]]
"""The method to run, the sink that plain rollout collapses onto, and what to say about the choice."""


def _choose(method: str, subject: AnySubject, options: Options) -> Choice:
    if method != "auto":
        return method, None, []
    if _begun(subject) is not None:
        return _for_encoder_decoder(subject, options)
    choose = _for_causal if subject.trace.is_causal() else _for_encoder
    return choose(subject, options)


def _for_encoder_decoder(subject: AnySubject, options: Options) -> Choice:
    if not _heeds("leave-one-out", options):
        return "rollout", None, [f"Leave-one-out does not heed {_listed(options)}: rollout is shown instead."]
    if _affordable(subject):
        return "leave-one-out", None, []
    return "rollout", None, ["Leave-one-out would take long on this text: rollout is shown instead."]


def _for_encoder(subject: AnySubject, options: Options) -> Choice:
    trace = subject.trace
    n, width = len(subject.encoding), subject.width
    if subject.question.rival is not None and _given(options) == set() and _affordable(subject):
        return "leave-one-out", None, ["A contrast needs a method that sees the target: leave-one-out is shown."]
    if not _heeds("alti", options):
        return "rollout", None, [f"Only plain rollout heeds {_listed(options)}: it is shown instead of contributions."]
    if any(op.block is None for op in trace.ops):
        return "rollout", None, [f"Contributions are not known for the family {trace.family}: plain rollout is shown."]
    if float(n * n * width) * sum(op.heads for op in trace.ops) > ALTI_LIMIT:
        return "rollout", None, ["Contributions would take long on this text: plain rollout is shown; --method alti."]
    return "alti", None, []


def _for_causal(subject: AnySubject, options: Options) -> Choice:
    from attrace.methods.rollout import find_sink, rollout_values

    plain = Options()
    sink = find_sink(subject, plain, rollout_values(subject, plain))
    if not _heeds("leave-one-out", options):
        chosen = "last-layer" if _heeds("last-layer", options) else "rollout"
        return chosen, sink, [f"Leave-one-out does not heed {_listed(options)}: {chosen} is shown instead."]
    notes = ["Plain rollout collapses here and is not the default; --method rollout shows it."] if sink else []
    if _affordable(subject):
        return "leave-one-out", sink, notes
    notes.append(
        f"Leave-one-out would take as many passes as there are tokens, {_free(subject)}: the last layer's attention is "
        "shown instead. --method leave-one-out takes the time."
    )
    return "last-layer", sink, notes


def _free(subject: AnySubject) -> int:
    return int((~subject.protected).sum())


def _affordable(subject: AnySubject) -> bool:
    """Whether leave-one-out stays within LEAVE_ONE_OUT_LIMIT."""
    return float(subject.parameters) * _free(subject) * subject.question.length <= LEAVE_ONE_OUT_LIMIT


def _given(options: Options) -> set[str]:
    """The options that are not as they are by default."""
    return {f.name for f in fields(Options) if getattr(options, f.name) != f.default}


def _listed(options: Options) -> str:
    return ", ".join(sorted(_given(options)))


def _heeds(name: str, options: Options) -> bool:
    from attrace.methods.registry import method

    return _given(options) <= set(method(name).uses)


def _notes(name: str, target: str, subject: AnySubject, scores: Scores) -> list[str]:
    """What the reader must know of this picture."""
    from attrace.methods.registry import method

    notes = []
    trace = subject.trace
    if name == "rollout" and scores.sink is not None:
        notes.append("This picture does not tell inputs apart; --method leave-one-out does.")
    if target != "auto" and subject.question.target.kind == "class" and not method(name).sees_target:
        notes.append(
            f"{name} tells what was read, not what spoke for or against: the picture is much the same for every class. "
            "--method leave-one-out tells them apart."
        )
    begun = _begun(subject)
    own = 0.0 if begun is None or scores.signed else float(scores.values[-begun.shape[1] :].sum())
    if own > 0:
        notes.append(
            f"{100 * own:.1f} % of the mass stays with the decoder's own tokens, which stand after the text as special "
            "ones."
        )
    text = float(abs(scores.values[~subject.encoding.special]).sum())
    if not scores.signed and scores.sink is None and text < LITTLE:
        notes.append(
            f"Only {100 * text:.1f} % of the mass is in the text, the rest in special tokens: colours and bars are "
            "scaled to that little."
        )
    if not method(name).sees_target:
        notes += trace.gaps
    return [*notes, *subject.remarks, *(note for note in trace.notes if note not in trace.gaps)]


def _begun(subject: AnySubject) -> Any:
    """The tokens that an encoder-decoder's decoder begins with, (1, m); None for other models."""
    return getattr(subject.encoding, "begun", None)


def _run(name: str, subject: AnySubject, options: Options, progress: Progress | None) -> Scores:
    from attrace.methods.registry import method

    chosen = method(name)
    if unused := sorted(_given(options) - set(chosen.uses)):
        raise InputError(
            f"Expected only options that {name} uses ({', '.join(chosen.uses) or 'none'}). Received: "
            f"{', '.join(unused)}. Leave them out, or name another method."
        )
    return chosen.run(subject, options, progress)


def _join(
    subject: AnySubject, scores: Scores, method: str, notes: tuple[str, ...], settings: dict[str, Any]
) -> Explanation:
    from attrace.aggregate.tokens import label_tokens
    from attrace.aggregate.words import words

    encoding, question = subject.encoding, subject.question
    tokens: tuple[Token, ...] = label_tokens(
        encoding.text, encoding.offsets, encoding.pieces, encoding.special.tolist()
    )
    total = float(abs(scores.values).sum()) + scores.lost_mass + scores.sink_mass
    return Explanation(
        text=encoding.text,
        tokens=tokens,
        scores=scores.values,
        words=words(encoding.text, tokens, scores.values, total=total),
        target=question.target,
        method=method,
        signed=scores.signed,
        unit=scores.unit,
        lost_mass=scores.lost_mass,
        sink_mass=scores.sink_mass,
        sink=scores.sink,
        predictions=question.predictions,
        model=subject.name,
        notes=notes,
        settings=settings,
    )


def _settings(subject: AnySubject, options: Options, method: str, seed: int) -> dict[str, Any]:
    from attrace.capture.questions import check_layers
    from attrace.methods.registry import method as find

    used, ran_on = find(method).uses, dict(subject.settings)
    packages = ran_on.pop("packages")
    layers = check_layers(options.layers, len(subject.trace.ops))
    if method == "last-layer":
        layers = layers[-1:]
    heads = options.heads if isinstance(options.heads, str | int) else [float(w) for w in options.heads]
    values = {"heads": heads, "residual": options.residual, "discard": options.discard, "layers": layers}
    return {
        **{key: value for key, value in values.items() if key in used},
        "seed": seed,
        **ran_on,
        "versions": {name: _version(name) for name in ("attrace", *packages)},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


@contextmanager
def _on_own_terms(seed: int) -> Iterator[None]:
    """Seeded, with the caller's generators left as they were; outside of the caller's inference mode."""
    try:
        import torch
    except ImportError:  # said by the loader, with the way out
        yield
        return
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.inference_mode(False):
        torch.manual_seed(seed)
        yield
