"""The door for plugins: everything of the core that a plugin may use.

A plugin imports this package and its modules, and nothing else of the core:

* ``pallasite.plugin``: hooks, rule sets, records, targets, errors, configuration; light to import.
* :mod:`pallasite.plugin.language`: references, memory spaces, checks, effects, kernels.
* :mod:`pallasite.plugin.layouts`: register and memory layouts as data.
* :mod:`pallasite.plugin.ir`: emitting MLIR.
* :mod:`pallasite.plugin.lowering`: values, contexts, transfers, the launch.
* :mod:`pallasite.plugin.inference`: layout inference.
* :mod:`pallasite.plugin.runtime`: compiling, caches, launching.
* :mod:`pallasite.plugin.jax_internals`: what of JAX has no public name.

The door has a version, :data:`PLUGIN_API`: names are added under a new minor number, and changed or
removed under a new major number only.
"""

from __future__ import annotations

from pallasite import config as config
from pallasite import plugins as plugins
from pallasite.barrier_kinds import BarrierKind as BarrierKind
from pallasite.barrier_kinds import BarrierOrder as BarrierOrder
from pallasite.barrier_kinds import BarrierPhase as BarrierPhase
from pallasite.barrier_kinds import BarrierRole as BarrierRole
from pallasite.barrier_kinds import BarrierUse as BarrierUse
from pallasite.errors import CompilationError as CompilationError
from pallasite.errors import ConfigError as ConfigError
from pallasite.errors import ExecutionError as ExecutionError
from pallasite.errors import InternalError as InternalError
from pallasite.errors import InvalidTypeError as InvalidTypeError
from pallasite.errors import InvalidValueError as InvalidValueError
from pallasite.errors import MissingNameError as MissingNameError
from pallasite.errors import MissingRuleError as MissingRuleError
from pallasite.errors import PallasiteError as PallasiteError
from pallasite.errors import PluginError as PluginError
from pallasite.errors import ResourceError as ResourceError
from pallasite.errors import SourceLocation as SourceLocation
from pallasite.errors import UnsupportedError as UnsupportedError
from pallasite.extensions import Diagnosis as Diagnosis
from pallasite.extensions import Executor as Executor
from pallasite.extensions import InferenceRule as InferenceRule
from pallasite.extensions import InstructionRule as InstructionRule
from pallasite.extensions import LaunchRequest as LaunchRequest
from pallasite.extensions import LayoutProposal as LayoutProposal
from pallasite.extensions import LayoutRule as LayoutRule
from pallasite.extensions import LoweringRule as LoweringRule
from pallasite.extensions import NamedLayout as NamedLayout
from pallasite.extensions import OperandPredicate as OperandPredicate
from pallasite.extensions import Operation as Operation
from pallasite.extensions import Pass as Pass
from pallasite.extensions import PtxLaunch as PtxLaunch
from pallasite.extensions import Replacement as Replacement
from pallasite.extensions import ResourceRule as ResourceRule
from pallasite.extensions import Rule as Rule
from pallasite.extensions import RuleSet as RuleSet
from pallasite.extensions import RunOptions as RunOptions
from pallasite.extensions import RunReport as RunReport
from pallasite.extensions import Semantics as Semantics
from pallasite.extensions import StoreNamespace as StoreNamespace
from pallasite.extensions import Translation as Translation
from pallasite.hookspecs import hookimpl as hookimpl
from pallasite.jaxpr_table import JaxprPrimitive as JaxprPrimitive
from pallasite.known_plugins import is_own as is_own
from pallasite.lifecycle import KernelLifecycle as KernelLifecycle
from pallasite.lifecycle import imported_on_call as imported_on_call
from pallasite.memory_events import GENERIC as GENERIC
from pallasite.memory_events import EventContext as EventContext
from pallasite.memory_events import EventKind as EventKind
from pallasite.memory_events import MemoryEvent as MemoryEvent
from pallasite.memory_events import MemoryEvents as MemoryEvents
from pallasite.memory_events import Proxy as Proxy
from pallasite.memory_events import ProxyFence as ProxyFence
from pallasite.order_tables import BarrierTables as BarrierTables
from pallasite.order_tables import MemoryTables as MemoryTables
from pallasite.plugin_api import PLUGIN_API as PLUGIN_API
from pallasite.plugin_options import option as option
from pallasite.plugin_values import check_layouts as check_layouts
from pallasite.plugin_values import note_code as note_code
from pallasite.plugins import manager as manager
from pallasite.registry import Registry as Registry
from pallasite.resource import BARRIERS as BARRIERS
from pallasite.resource import SHARED_MEMORY as SHARED_MEMORY
from pallasite.resource import Resource as Resource
from pallasite.target_selection import find_target as find_target
from pallasite.target_selection import select_target as select_target
from pallasite.targets import BASELINE_FEATURES as BASELINE_FEATURES
from pallasite.targets import Target as Target
from pallasite.targets import TargetPredicate as TargetPredicate
from pallasite.view_rules import ViewRule as ViewRule
from pallasite.view_rules import nothing_changes as nothing_changes
