"""What is PyTorch's own: functions that its protocol for overrides calls, and modes that see every call."""

from __future__ import annotations

import sys
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

from torch._C import TensorBase
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from matrixdp.errors import InvalidInput

_OF_CLASSES = (MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType)


def is_of_torch(function: Any) -> bool:
    """Whether a function, or a method or property of tensors, is PyTorch's; those of `torch.ops` are not functions."""
    if type(function) is FunctionType:
        name = str(function.__globals__.get("__name__"))  # while its __module__ could be changed
        return name.split(".")[0] == "torch" and vars(sys.modules.get(name, object)) is function.__globals__
    if type(function) is BuiltinFunctionType:
        return (function.__module__ or "").split(".")[0] == "torch"
    if type(function) is MethodWrapperType:  # of a property
        function = function.__self__
    return type(function) in _OF_CLASSES and function.__objclass__ is TensorBase


def refuse_modes_of_users() -> None:
    """Raises InvalidInput within a mode that is not PyTorch's: it would get the whole batch, and could keep it."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = (*stack, *_get_current_dispatch_mode_stack())
    if not all(_is_known(type(mode)) for mode in modes):
        raise InvalidInput(
            "training runs within a torch function mode, or a dispatch mode, that is not PyTorch's: it would see whole "
            "batches; leave it before"
        )


def _is_known(kind: type) -> bool:
    """Whether a class is found in a module of PyTorch, or of this library; any class may give itself their names."""
    package = kind.__module__.split(".")[0]
    return package in ("torch", "matrixdp") and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
