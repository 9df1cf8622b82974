"""Effects of the primitives: what keeps an equation live and in order.

All of them are local to a kernel and allowed under control flow.
"""

from __future__ import annotations

from pallasite import _jax


class MemoryEffect(_jax.Effect):  # type: ignore[misc]
    """Orders memory and synchronisation operations whose operands do not say what they touch."""

    def __str__(self) -> str:
        return "Memory"


class ProgrammaticLaunchEffect(_jax.Effect):  # type: ignore[misc]
    """Marks a kernel that waits for the kernel before it (programmatic dependent launch)."""

    def __str__(self) -> str:
        return "ProgrammaticLaunch"


class TensorCorePipelineEffect(_jax.Effect):  # type: ignore[misc]
    """Orders asynchronous matrix operations whose results are in registers."""

    def __str__(self) -> str:
        return "TensorCorePipeline"


class CommunicationEffect(_jax.Effect):  # type: ignore[misc]
    """Keeps calls of kernels that communicate with other devices in their order, on each device."""

    def __str__(self) -> str:
        return "Communication"


memory_effect = MemoryEffect()
"""Of primitives that touch memory in ways that their references do not say."""
programmatic_launch_effect = ProgrammaticLaunchEffect()
"""Of primitives that wait for earlier kernels, or let later ones begin."""
tensor_core_pipeline_effect = TensorCorePipelineEffect()
"""Of primitives whose work the tensor cores finish later, in order."""


def register_kernel_effect(effect_type: type) -> None:
    """Allows an effect inside kernels, under control flow too; it does not leave the kernel."""
    _jax.kernel_local_effects.add_type(effect_type)
    _jax.control_flow_allowed_effects.add_type(effect_type)


communication_effect = CommunicationEffect()
"""Of calls of kernels whose bodies have ``comms_effect``: ordered, on each device."""
_jax.allow_ordered_effect(CommunicationEffect)

for _effect_type in (MemoryEffect, ProgrammaticLaunchEffect, TensorCorePipelineEffect):
    register_kernel_effect(_effect_type)
