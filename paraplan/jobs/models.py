"""Models by name: Hugging Face architectures from their configuration, factories of the user's own.

Random weights only; nothing is downloaded. transformers is optional and imported where it is used.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paraplan.capture import fingerprint
from paraplan.capture.exporting.export import LossFn
from paraplan.ir.errors import ParaplanError
from paraplan.ir.model.program import Program
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.inputs import hf_batch as hf_batch  # where callers find it beside the models

_VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "architectures")

_PAIRS = frozenset(
    {"clip", "siglip", "siglip2", "chinese_clip", "altclip", "vision-text-dual-encoder", "metaclip_2", "blip"}
)
_ROUTED, _START = "output_router_logits", "decoder_start_token_id"


class ModelError(ParaplanError):
    """A model named on the command line cannot be made."""


@dataclass(frozen=True)
class Made:
    """A model and what its maker says about it.

    Attributes:
        model: with or without values.
        example_inputs: one global batch, or None.
        loss_fn: or None where the model returns its loss.
    """

    model: nn.Module
    example_inputs: dict[str, Tensor] | tuple[object, ...] | None = None
    loss_fn: LossFn | None = None


def make_model(text: str, settings: Mapping[str, Any], meta: bool) -> Made:
    """The model a text stands for: `hf:<model_type>`, `package.module:factory` or `path/file.py:factory`.

    Args:
        text: from the command line.
        settings: configuration of a Hugging Face model.
        meta: without values; factories decide for themselves.
    Raises:
        ModelError: it cannot be made; says what to write.
    """
    if text.startswith("hf:"):
        return Made(hf_model(text[3:], settings, meta))
    if settings:
        raise ModelError(f"--set belongs to hf: models; {text!r} is a factory, which takes no settings")
    return factory_model(text)


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415 - optional
    except ImportError as fault:
        raise ModelError(f"hf: models need transformers ({fault}); pip install 'paraplan[hf]'") from None
    return transformers


def hf_model(model_type: str, settings: Mapping[str, Any], meta: bool) -> nn.Module:
    """A Hugging Face model with random weights and its loss, in training mode.

    Args:
        model_type: of transformers, such as "gpt2".
        settings: of its configuration, where they differ from the defaults.
        meta: on the meta device, without values.
    Raises:
        ModelError: unknown type or setting (with what comes near), or settings transformers refuses.
    """
    transformers = _transformers()
    transformers.logging.set_verbosity_error()
    config = _hf_config(transformers, model_type, settings)
    auto = getattr(transformers, _auto_class(config))
    try:
        with torch.device("meta") if meta else nullcontext(), _Literals() if meta else nullcontext():
            return _ready(auto.from_config(config))
    except Exception as fault:
        raise ModelError(
            f"transformers cannot build {model_type} with {dict(settings)}: {type(fault).__name__}: {fault}"
        ) from fault


class _Literals(TorchFunctionMode):
    """Numbers a constructor writes out (a logit scale) keep their value on a model that has no other."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and isinstance(args[0] if args else None, int | float):
            kwargs = {"device": "cpu", **(kwargs or {})}
        return func(*args, **(kwargs or {}))


def _ready(model: Any) -> nn.Module:
    """In training mode; a pair of towers returns its loss, and a mixture runs in any precision when it runs eagerly."""
    if model.config.model_type in _PAIRS:
        model.forward = partial(model.forward, return_loss=True)
    if any(hasattr(module, "_apply_gate") for module in model.modules()):
        model.set_experts_implementation("eager")
    return model.train()  # type: ignore[no-any-return]


def _complete(config: Any, settings: Mapping[str, Any]) -> Any:
    """What a configuration leaves open and training needs: a decoder's first token, a mixture's balancing loss."""
    words = getattr(config, "vocab_size", None) or sys.maxsize
    first = [getattr(config, name, None) for name in (_START, "pad_token_id", "bos_token_id")]
    if getattr(config, "is_encoder_decoder", False):  # a start of a larger vocabulary than the settings' is none
        setattr(config, _START, next((token for token in first if token is not None and token < words), 0))
    if hasattr(config, _ROUTED) and _ROUTED not in settings:
        setattr(config, _ROUTED, True)
    return config


def _hf_config(transformers: Any, model_type: str, settings: Mapping[str, Any]) -> Any:
    mapping = transformers.CONFIG_MAPPING
    if model_type not in mapping:
        raise ModelError(f"transformers has no model type {model_type!r}{_near(model_type, list(mapping.keys()))}")
    cls = mapping[model_type]
    known = {*cls().to_dict(), *getattr(cls, "attribute_map", {}), "num_labels"}  # every configuration takes labels
    known |= {_START} if getattr(cls(), "is_encoder_decoder", False) else set()
    for key, value in settings.items():
        if key not in known and not _reads(cls, key):
            near = _near(key, sorted(known)) or f"; it has {', '.join(_own(cls, settings))}"
            raise ModelError(f"{model_type} has no setting {key!r}{near}")
        usual = getattr(cls(), key, None)
        if _is_size(key, usual) and isinstance(value, int) and value < 0:
            raise ModelError(f"{model_type} cannot have {key}={value}: it is a size ({usual} where nothing is said)")
    try:
        return _complete(cls(**settings), settings)
    except Exception as fault:
        raise ModelError(f"{model_type} refuses {dict(settings)}: {fault}") from fault


def _own(cls: type, settings: Mapping[str, Any]) -> list[str]:
    """A type's settings, without those of every type."""
    usual = import_module("transformers").PretrainedConfig().to_dict()
    return sorted({*cls().to_dict()} - {*usual, *settings} - {"model_type"})


def _is_size(key: str, usual: object) -> bool:
    return isinstance(usual, int) and not isinstance(usual, bool) and usual > 0 and not key.endswith("_id")


def _reads(cls: type, key: str) -> bool:
    """Whether a type's model reads a setting that its configuration has no default for."""
    module = cls.__module__.replace(".configuration_", ".modeling_")
    spec = find_spec(module)
    text = Path(spec.origin).read_text() if spec is not None and spec.origin is not None else ""
    return key.isidentifier() and re.search(rf'config(\.{key}\b|, "{key}")', text) is not None


def _near(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 5, 0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _auto_class(config: Any) -> str:
    """Pairs of towers, speech recognisers, encoder-decoders, then models trained by masking, then causal ones (many of
    the others can also be built causal), then classifiers of images, videos and sounds."""
    names = import_module("transformers.models.auto.modeling_auto")
    kind = config.model_type
    if kind in _PAIRS:
        return "AutoModel"
    if kind in names.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return "AutoModelForSpeechSeq2Seq"
    if kind in names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and getattr(config, "is_encoder_decoder", False):
        return "AutoModelForSeq2SeqLM"
    if kind in names.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return "AutoModelForMaskedLM"
    if kind in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "AutoModelForCausalLM"
    if kind in names.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "AutoModelForImageClassification"
    if kind in names.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES:
        return "AutoModelForVideoClassification"
    if kind in names.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES:
        return "AutoModelForAudioClassification"
    raise ModelError(
        f"{kind} is no language model, classifier of images, videos or sounds, speech recogniser or pair of towers; "
        "give it through a factory, package.module:factory, with example inputs"
    )


def model_ref(model: nn.Module, program: Program, made_here: bool) -> ModelRef:
    """How a plan names its model; Hugging Face ones that their configuration alone rebuilds carry it as data.

    Args:
        model: what was captured.
        program: its program.
        made_here: whether batch and loss are the standard ones.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if not made_here or not kind or not hasattr(config, "to_diff_dict"):
        return ModelRef(display=type(model).__name__)
    diff = {key: value for key, value in config.to_diff_dict().items() if key not in (*_VOLATILE, "model_type")}
    try:
        settings = json.loads(json.dumps(diff, sort_keys=True))
        rebuilt = hf_model(kind, settings, meta=True)
    except (ModelError, TypeError, ValueError):
        return ModelRef(display=type(model).__name__)
    if fingerprint(rebuilt, program.precision) != program.fingerprint:
        return ModelRef(display=type(model).__name__)
    return ModelRef(display=type(model).__name__, hf_type=kind, hf_settings=settings)


def plan_model(plan: Plan, named: str | None, meta: bool) -> Made:
    """The model a plan is for, made anew.

    Args:
        plan: its Hugging Face configuration is data, so such a model is rebuilt from it.
        named: what the user names, if anything; needed for factories.
        meta: without values.
    Raises:
        ModelError: the plan holds no configuration and nothing is named, or what is named cannot be made.
    """
    if named is not None and not named.startswith("hf:"):
        return factory_model(named)
    if plan.model.hf_type is None:
        raise ModelError(
            f"the plan's model, {plan.model.display}, came from a factory or from code: "
            "name it again with --model package.module:factory"
        )
    if named is not None and named != f"hf:{plan.model.hf_type}":
        raise ModelError(
            f"the plan is for hf:{plan.model.hf_type}, not {named}; leave --model out to rebuild it from the plan"
        )
    return Made(hf_model(plan.model.hf_type, plan.model.hf_settings, meta))


def _module(name: str, text: str) -> ModuleType:
    """A module by its name, found from the current directory too, or by its file."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return _module_of_file(Path(name)) if name.endswith(".py") else import_module(name)
    except Exception as fault:
        raise ModelError(
            f"cannot import {name!r} of model {text!r} (looked in {here} too): {type(fault).__name__}: {fault}"
        ) from fault


def _module_of_file(path: Path) -> ModuleType:
    """A file as the module of its stem, once; what lies beside it can be imported from it."""
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    held = sys.modules.get(path.stem)
    if held is not None and getattr(held, "__file__", None) == str(path):
        return held
    name = path.stem if held is None else f"{path.stem}@{path.parent}"  # another module has its name
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made


def factory_model(text: str) -> Made:
    """Call the factory `package.module:factory`, found from the current directory too, or `path/file.py:factory`.

    Raises:
        ModelError: it does not import, does not exist, fails, or returns something else than documented.
    """
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        raise ModelError(
            f"model {text!r}: write hf:<model_type>, e.g. hf:gpt2, or package.module:factory, or path/file.py:factory"
        )
    module = _module(module_name, text)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        public = [name for name in dir(module) if not name.startswith("_")]
        what = "has no attribute" if factory is None else "holds no function under"
        raise ModelError(f"module {module_name!r} {what} {attribute!r}{_near(attribute, public)}")
    try:
        made = factory()
    except Exception as fault:
        raise ModelError(f"factory {text!r} failed: {type(fault).__name__}: {fault}") from fault
    return _unpack(made, text)


def _unpack(made: object, text: str) -> Made:
    parts = made if isinstance(made, tuple) else (made,)
    model, inputs, loss_fn = (*parts, None, None)[:3]
    fine = (
        len(parts) <= 3
        and isinstance(model, nn.Module)
        and (inputs is None or isinstance(inputs, (dict, tuple, list, Tensor)))
    )
    if not fine or not (loss_fn is None or callable(loss_fn)):
        got = ", ".join(type(part).__name__ for part in parts)
        raise ModelError(
            f"factory {text!r} returned ({got}); "
            "it must return a model, (model, example_inputs) or (model, example_inputs, loss_fn)"
        )
    if isinstance(inputs, (list, Tensor)):
        inputs = tuple(inputs) if isinstance(inputs, list) else (inputs,)
    return Made(model, inputs, loss_fn)  # type: ignore[arg-type]
