"""Hugging Face models and tokenizers, loaded with safetensors only, no code of theirs, no network unless named."""

from __future__ import annotations

import json
import logging
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from attrace.errors import (
    AttraceError,
    InputError,
    MissingDependencyError,
    ModelError,
    UnsafeWeightsError,
)

Task = Literal["classifier", "causal", "masked", "encoder", "seq2seq"]

EMBEDDED = "embedded"
"""The name of the model that the package carries."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack")
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
HEADER_LIMIT = 32 * 1024 * 1024
"""Bytes of a safetensors header; real ones take kilobytes."""
HEADS: tuple[tuple[str, Task, str], ...] = (
    ("ForSequenceClassification", "classifier", "AutoModelForSequenceClassification"),
    ("ForMaskedLM", "masked", "AutoModelForMaskedLM"),
    ("ForCausalLM", "causal", "AutoModelForCausalLM"),
    ("LMHeadModel", "causal", "AutoModelForCausalLM"),
    ("ForConditionalGeneration", "seq2seq", "AutoModelForSeq2SeqLM"),
    ("MTModel", "seq2seq", "AutoModelForSeq2SeqLM"),
    ("Model", "encoder", "AutoModel"),
)


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, ready to run."""

    model: Any
    tokenizer: Any
    task: Task
    name: str
    """What to call it in results: a folder's or a hub's name, never a full path."""


def task_of(architecture: str) -> tuple[Task, str]:
    """The task that a model class is for, and the auto class that loads it."""
    for ending, task, auto in HEADS:
        if architecture.endswith(ending):
            return task, auto
    raise ModelError(
        "Expected a text model: a sequence classifier, a causal or masked language model, an encoder, or an "
        "encoder-decoder that writes text. "
        f"Received: {architecture}. Other kinds are not supported yet."
    )


def load(name: str | os.PathLike[str] | None, *, device: str | None = None) -> Loaded:
    """Load a local folder, a hub name, or (None or "embedded") the model that the package carries.

    Weights are read from safetensors only.  The network is used only where the name is no folder, and then by
    huggingface_hub under its own settings.  On a CPU weights become float32.

    Raises ModelError for what is no model, UnsafeWeightsError for weights in pickle form, InputError for an
    unknown device, MissingDependencyError without transformers.
    """
    transformers = _transformers()
    folder, shown = _resolve(name)
    options: dict[str, Any] = {"trust_remote_code": False}
    source: str = str(name)
    if folder is not None:
        _check_folder(folder)
        source, options["local_files_only"] = str(folder), True
    with clear_errors(shown if folder is not None else f"{shown} (no folder of that name here; a hub name)"), quiet():
        config = transformers.AutoConfig.from_pretrained(source, **options)
        architecture = _architecture(transformers, config, source)
        task, auto = task_of(architecture)
        _check_streams(config, architecture, task)
        where = check_device(device)
        model, report = getattr(transformers, auto).from_pretrained(
            source,
            config=config,
            use_safetensors=True,
            dtype="float32" if where == "cpu" else "auto",
            output_loading_info=True,
            **options,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    absent = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if absent:
        raise ModelError(
            f"Expected weights for all of {architecture} in {shown}. Received: none for {', '.join(absent[:3])}"
            f"{' and more' if len(absent) > 3 else ''}; they would be random. Give the trained model."
        )
    return Loaded(model.to(where).eval(), tokenizer, task, shown)


def _check_streams(config: Any, architecture: str, task: Task) -> None:
    two = bool(getattr(config, "is_encoder_decoder", False))
    if task == "seq2seq":
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as TEXT

        if not two or architecture not in TEXT.values():
            raise ModelError(
                f"Expected a model that reads text alone. Received: {architecture}. Its attention can be read: "
                "attrace.trace(model, **inputs).rollout()."
            )
    elif two:
        raise ModelError(
            f"Expected an encoder-decoder with a head that writes text (ForConditionalGeneration). Received: "
            f"{architecture}, an encoder and a decoder with another head, which is not supported yet. Its attention "
            "can be read: attrace.trace(model, **inputs).rollout()."
        )


def adopt(model: Any, processor: Any) -> Loaded:
    """A model object that the caller holds, with its tokenizer; nothing of it is changed or moved."""
    if processor is None:
        raise InputError(
            f"Expected the tokenizer of {type(model).__name__} as processor=. Received: none. "
            "Give it, or give the model as a folder or a hub name."
        )
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", "") or type(model).__name__
    task, _ = task_of(type(model).__name__)
    _check_streams(config, type(model).__name__, task)
    return Loaded(model, processor, task, Path(name).name if os.path.isabs(name) else name)


def check_device(device: str | None) -> str:
    """The device to run on: as asked, or "cpu"."""
    import torch

    if device is None or device == "cpu":
        return "cpu"
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device not in there and not (device == "cuda" and len(there) > 1):
        raise InputError(f"Expected a device of this machine: {', '.join(there)}. Received: {device!r}.")
    return device


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and hints off the user's screen; everything is set back afterwards."""
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()


def _transformers() -> Any:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            f"Expected PyTorch and transformers to explain a model. Received: {error}. "
            "Install them with: pip install 'attrace[hf]'"
        ) from None
    return transformers


def _architecture(transformers: Any, config: Any, source: str) -> str:
    """The class that config.json names; where it names none, a language model if it comes with settings to write."""
    named = getattr(config, "architectures", None)
    if named:
        return str(named[0])
    writers = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.model_type in writers and Path(source, "generation_config.json").is_file():
        return str(writers[config.model_type])
    return "a config.json without architectures"


def _resolve(name: str | os.PathLike[str] | None) -> tuple[Path | None, str]:
    """The folder, where it is one, and the name to show."""
    if name is None or name == EMBEDDED:
        return Path(str(files("attrace") / "assets" / "spam")), "attrace's embedded spam classifier"
    try:
        path = Path(name).expanduser()
        if str(name).strip() and path.is_dir():
            return path, path.resolve().name
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown user's home
        raise ModelError(f"Expected a model's folder or a hub name. Received: {str(name)!r} ({error}).") from None
    looks_local = isinstance(name, os.PathLike) or there or str(name).startswith((".", "~", os.sep))
    if looks_local or str(name).count("/") > 1 or not str(name).strip():
        what = "a file" if path.is_file() else "nothing there"
        raise ModelError(f"Expected a model's folder or a hub name. Received: {str(name)!r} ({what}).")
    return None, str(name)


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"Expected a model's folder with config.json, *.safetensors and a tokenizer. Received: "
            f"{str(folder)!r}, which has no config.json."
        )
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Expected config.json of {str(folder)!r} to be JSON. Received: {error}.") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ModelError(f"Expected config.json of {str(folder)!r} to name a model_type. Received: none.")
    if "auto_map" in settings:
        raise UnsafeWeightsError(
            f"Expected a model of the transformers library. Received: {str(folder)!r}, which brings code of its own "
            "(auto_map in config.json); attrace never runs such code. Load it yourself and give the object."
        )
    backend = settings.get("_attn_implementation", settings.get("attn_implementation"))
    if "/" in str(backend):
        raise UnsafeWeightsError(
            f"Expected an attention backend of the transformers library. Received: {backend!r} in config.json of "
            f"{str(folder)!r}, whose code would come from a hub; attrace never runs such code."
        )
    _check_shards(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickled = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickled:
            raise UnsafeWeightsError(
                f"Expected weights as *.safetensors. Received: {', '.join(pickled[:3])} in {str(folder)!r}; loading "
                "such a file can run code, so attrace refuses. Convert it with model.save_pretrained(folder)."
            )
        raise ModelError(f"Expected weights as *.safetensors in {str(folder)!r}. Received: no weight file.")
    for path in weights:
        _check_header(path)
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        # transformers would make up a tokenizer that knows no word.
        raise ModelError(
            f"Expected a tokenizer in {str(folder)!r}: tokenizer.json or a vocabulary. Received: none. Save it there "
            "with tokenizer.save_pretrained(folder)."
        )


def _check_shards(folder: Path) -> None:
    """An index may name files of its own folder only."""
    for index in folder.glob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            strange = sorted(name for name in names if Path(name).name != name)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"Expected {index.name} of {str(folder)!r} to map weights to files. Received: {error}. Save it anew."
            ) from None
        if strange:
            raise UnsafeWeightsError(
                f"Expected shards beside {index.name}. Received: {strange[0]!r}, which lies outside of "
                f"{str(folder)!r}. Save the model anew."
            )


def _check_header(path: Path) -> None:
    """Look at a safetensors file's header length before anything is allocated for it."""
    if not path.is_file():
        raise ModelError(f"Expected {path.name} to be a file. Received: something else. Remove it from the folder.")
    with open(path, "rb") as file:
        head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 2 <= length <= min(HEADER_LIMIT, path.stat().st_size - 8):
        raise ModelError(
            f"Expected a safetensors file. Received: {path.name} of {path.stat().st_size} bytes with a header "
            f"length of {length}. The file is damaged or is no safetensors file."
        )


@contextmanager
def clear_errors(shown: str) -> Iterator[None]:
    """Turn whatever the libraries raise for an unfit model, tokenizer or text into one ModelError.

    What stands in a folder decides what they raise: a tokenizer's error is a plain Exception, and a panic inside its
    compiled part no Exception at all.  attrace's own errors and an interruption pass.
    """
    try:
        yield
    except (AttraceError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ModelError(
            f"Expected a model that transformers can load and run. Received for {shown}: {type(error).__name__}: "
            f"{first} Check the folder's files; a model of another kind can be loaded by hand, for attrace.trace."
        ) from error
