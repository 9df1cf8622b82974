"""Code generation and the runtime: compiling, caches, launching."""

from __future__ import annotations

from pallasite import files as files
from pallasite.codegen.compiled import CompiledKernel as CompiledKernel
from pallasite.codegen.tools import find_tool as find_tool
from pallasite.runtime.compiler import Unkeyable as Unkeyable
from pallasite.runtime.compiler import compile_kernel as compile_kernel
from pallasite.runtime.executors import check_device as check_device
from pallasite.runtime.executors import find_executor as find_executor
from pallasite.runtime.executors import interpreter as interpreter
from pallasite.runtime.hidden import LaunchDevice as LaunchDevice
from pallasite.runtime.hidden import OperandProvider as OperandProvider
from pallasite.runtime.hidden import consume_hidden_results as consume_hidden_results
from pallasite.runtime.hidden import hidden_operands as hidden_operands
from pallasite.runtime.jax_lowering import kernel_in_equation as kernel_in_equation
from pallasite.runtime.launch import TENSOR_MAP_BYTES as TENSOR_MAP_BYTES
from pallasite.runtime.launch import launcher as launcher
from pallasite.runtime.launch import launches_nothing as launches_nothing
from pallasite.runtime.launch import nbytes as nbytes
from pallasite.runtime.launch import validate_launch as validate_launch
from pallasite.runtime.override import current as current
from pallasite.runtime.store import CacheWarning as CacheWarning
from pallasite.runtime.store import DocumentStore as DocumentStore
from pallasite.runtime.store import SealedStore as SealedStore
