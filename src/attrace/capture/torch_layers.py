"""Which layers of a PyTorch model showed no attention, and what they are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain

from torch import nn

BETWEEN_STAGES = re.compile("Merg|Pool|Down|Embed|Norm")
"""What stands between stages of layers: it changes the number of tokens, or nothing about them."""
PARTS_NAMED = 6
"""How many classes a message names."""


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """What `named_modules` gives, in a third of its time: a trace of a small model feels it."""
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    ahead = [("", model)]
    while ahead:
        name, module = ahead.pop()
        if module in seen:
            continue
        seen.add(module)
        found[name] = module
        if module._modules:
            start = f"{name}." if name else ""
            ahead += [(start + key, child) for key, child in reversed(module._modules.items()) if child is not None]
    return found


def stacks_of(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The lists of layers among named modules."""
    return {name: module for name, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))}


def layers_without(stacks: Mapping[str, nn.Module], callers: Iterable[str]) -> tuple[int, list[str]]:
    """How many layers the stacks with attention have, and which of them made no attention call, with their kind.

    `callers` are the modules that called attention.  A layer that holds such a module was not run, which is no gap.
    A list inside a layer counts only where its members are alike: a layer's own parts (attention, feed-forward) form
    lists as well.  In a plain sequence of unlike modules, which may begin with a stem and end with a head, only what
    lies between attention counts.
    """
    callers = set(callers)
    seen = set(chain.from_iterable(prefixes(name) for name in callers))
    total, without, counted = 0, [], set[str]()
    for name in sorted(stacks, key=lambda n: n.count(".")):
        children = dict(stacks[name].named_children())
        alike = len({type(child) for child in children.values()}) == 1
        if not alike and not counted.isdisjoint(prefixes(name)):
            continue
        full = {key: f"{name}.{key}" if name else key for key in children}
        with_attention = [key for key in children if full[key] in seen]
        if not with_attention:
            continue
        keys = list(children)
        if not alike and isinstance(stacks[name], nn.Sequential):
            keys = keys[keys.index(with_attention[0]) : keys.index(with_attention[-1]) + 1]
            keys = [k for k in keys if k in with_attention or is_layer(children[k])]
        counted.add(name)
        missing = [key for key in keys if full[key] not in seen]
        if missing:
            attention = {
                type(part)
                for key in with_attention
                for path, part in children[key].named_modules(prefix=full[key])
                if path in callers
            }
            missing = [k for k in missing if not any(type(part) in attention for part in children[k].modules())]
        if missing:
            usual = {type(part) for key in with_attention for part in children[key].children()}
            without += [f"{full[key]} ({kind_of(children[key], usual)})" for key in missing]
            total += len(keys)
    return total, without


def is_layer(module: nn.Module) -> bool:
    """Whether it has parts, as a layer does, and is none of those that stand between stages."""
    return next(module.children(), None) is not None and not BETWEEN_STAGES.search(type(module).__name__)


def kind_of(layer: nn.Module, usual: set[type[nn.Module]]) -> str:
    """The class of the part that the layer has in the place of attention; of the layer where none stands out."""
    own = [type(part) for part in layer.children() if type(part) not in usual]
    if len(own) == 1 or (own and isinstance(layer, (nn.ModuleList, nn.Sequential))):
        return own[0].__name__
    return type(layer).__name__


def prefixes(name: str) -> list[str]:
    """The modules that contain a module, itself included."""
    parts = name.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]


def described(model: nn.Module, stacks: Mapping[str, nn.Module]) -> str:
    """What a model without attention is made of: its first stack of layers, and the classes of their parts.

    Empty for a model that has no modules inside.
    """
    lists = (name for name in stacks if name and len(list(stacks[name].children())) > 0)
    name = min(lists, key=lambda n: (isinstance(stacks[n], nn.Sequential), n.count(".")), default="")
    layers = list(stacks[name].children()) if name else list(model.children())
    if not layers:
        return ""
    kinds = dict.fromkeys(type(layer).__name__ for layer in layers)
    parts = dict.fromkeys(
        type(part).__name__
        for layer in layers
        for child in layer.children()
        for part in (child, *child.children())
        if not type(part).__module__.startswith("torch.nn")
    )
    inside = f" with {', '.join(list(parts)[:PARTS_NAMED])}" if parts else ""
    return f"{len(layers)} layers {name or 'at its top'}: {', '.join(list(kinds)[:PARTS_NAMED])}{inside}"
