"""Running compiled kernels: compilation through caches, launching from JAX, executors."""

from __future__ import annotations

from pallasite.runtime.api import compile as compile
from pallasite.runtime.api import compile_all as compile_all
from pallasite.runtime.callback import kernel_errors as kernel_errors
from pallasite.runtime.callback import run_on_host as run_on_host
from pallasite.runtime.compiler import CacheInfo as CacheInfo
from pallasite.runtime.compiler import cache_info as cache_info
from pallasite.runtime.compiler import clear_memory as clear_memory
from pallasite.runtime.compiler import compile_kernel as compile_kernel
from pallasite.runtime.disk_cache import CacheWarning as CacheWarning
