"""Translation of ``gpu``, and of what ``nvvm`` has for lanes, fences and matrices of a warp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallasite.plugin import UnsupportedError
from pallasite.plugin.codegen import Emitter, Handler, Operand

# Ids ------------------------------------------------------------------------------------------


def _dimension(operation: Any) -> str:
    return _word(operation.attributes["dimension"])


def _word(attribute: Any) -> str:
    """``"#gpu<dim x>"``, ``"#nvvm.proxy_kind<async>"``: the last word between the brackets."""
    return str(attribute).partition("<")[2].rpartition(">")[0].split()[-1]


def _special_register(emitter: Emitter, name: str) -> str:
    return emitter.instruction(f"call i32 @llvm.nvvm.read.ptx.sreg.{name}()")


def _id(name: str) -> Handler:
    """A special register of each dimension, as an index; sizes that the launch fixes are known."""

    def handle(emitter: Emitter, operation: Any) -> None:
        dimension = _dimension(operation)
        extent = emitter.extents.get("ntid" if name == "tid" else name)
        if extent is not None:
            size = extent["xyz".index(dimension)]
            if name != "tid" or size == 1:
                emitter.bind(operation, "i64", str(0 if name == "tid" else size))
                return
        value = _special_register(emitter, f"{name}.{dimension}")
        emitter.define(operation, "i64", f"zext i32 {value} to i64")

    return handle


def _lane(emitter: Emitter, operation: Any) -> None:
    value = _special_register(emitter, "laneid")
    emitter.define(operation, "i64", f"zext i32 {value} to i64")


def _read_register(emitter: Emitter, operation: Any) -> None:
    name = operation.operation.name.removeprefix("nvvm.read.ptx.sreg.")
    emitter.bind(operation, "i32", _special_register(emitter, name))


# Assembly -------------------------------------------------------------------------------------


def _assembly(
    emitter: Emitter,
    text: str,
    operands: Sequence[Operand] = (),
    results: int = 0,
    result_type: str = "void",
) -> str:
    """Emits an instruction of the hardware; ``$0`` and so on are results, then operands.

    Every operand and result has 32 bits, or is a pointer to shared memory.
    """
    constraints = ",".join(["=r"] * results + ["r"] * len(operands) + ["~{memory}"])
    arguments = ", ".join(" ".join(operand) for operand in operands)
    call = f'call {result_type} asm sideeffect "{text}", "{constraints}"({arguments}) #2'
    if results:
        return emitter.instruction(call)
    emitter.statement(call)
    return ""


def _statement(text: str) -> Handler:
    """An instruction without operands and results."""

    def handle(emitter: Emitter, operation: Any) -> None:
        _assembly(emitter, text)

    return handle


_FENCES = {
    "alias": "fence.proxy.alias",
    "async": "fence.proxy.async",
    "async.global": "fence.proxy.async.global",
    "async.shared": "fence.proxy.async.shared::{space}",
}


def _fence_proxy(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    kind = _word(attributes["kind"])
    space = _word(attributes["space"]) if "space" in attributes else "cta"
    _assembly(emitter, _FENCES[kind].format(space=space) + ";")


def _elect(emitter: Emitter, operation: Any) -> None:
    masks = emitter.operands(operation) or [("i32", "-1")]
    text = "{ .reg .pred p; elect.sync _|p, $1; selp.u32 $0, 1, 0, p; }"
    chosen = _assembly(emitter, text, masks, 1, "i32")
    emitter.define(operation, "i1", f"icmp ne i32 {chosen}, 0")


def _shuffle(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    if "return_value_and_is_valid" in attributes:
        raise UnsupportedError("a shuffle that also says whether its source was in range")
    kind = _word(attributes["kind"])
    mask, value, *rest = emitter.typed(operation)
    type_ = emitter.result_type(operation)
    suffix = {"i32": "i32", "float": "f32"}.get(type_)
    if suffix is None:
        raise UnsupportedError(f"a shuffle of {type_}", expected="values of 32 bits")
    arguments = ", ".join((mask, value, *rest))
    name = f"llvm.nvvm.shfl.sync.{kind}.{suffix}"
    emitter.define(operation, type_, f"call {type_} @{name}({arguments})")


def _warp_barrier(emitter: Emitter, operation: Any) -> None:
    _assembly(emitter, "bar.warp.sync $0;", emitter.operands(operation))


def _cluster_barrier(text: str) -> Handler:
    def handle(emitter: Emitter, operation: Any) -> None:
        aligned = ".aligned" if "aligned" in operation.attributes else ""
        _assembly(emitter, f"barrier.cluster.{text}{aligned};")

    return handle


def _reduce(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    kind = _word(attributes["kind"])
    type_ = emitter.result_type(operation)
    if type_ != "i32":
        raise UnsupportedError(f"redux.sync of {type_}", expected="integers of 32 bits")
    text = ", ".join(emitter.typed(operation))
    emitter.define(operation, type_, f"call i32 @llvm.nvvm.redux.sync.{kind}({text})")


def _vote(emitter: Emitter, operation: Any) -> None:
    kind = _word(operation.attributes["kind"])
    type_ = emitter.result_type(operation)
    text = ", ".join(emitter.typed(operation))
    emitter.define(operation, type_, f"call {type_} @llvm.nvvm.vote.{kind}.sync({text})")


def _map_to_block(emitter: Emitter, operation: Any) -> None:
    """The address of the same place in the shared memory of another block of the cluster."""
    (kind, pointer), (_, block) = emitter.operands(operation)
    result = emitter.result_type(operation)
    if kind != "ptr addrspace(3)" or result != "ptr addrspace(7)":
        raise UnsupportedError(
            f"mapa from {kind} to {result}", expected="from shared memory to that of the cluster"
        )
    text = f"@llvm.nvvm.mapa.shared.cluster({kind} {pointer}, i32 {block})"
    emitter.define(operation, result, f"call {result} {text}")


# Matrices -------------------------------------------------------------------------------------


def _matrix_words(attributes: Any, count: int, kind: str) -> str:
    """The modifiers of ldmatrix and stmatrix."""
    shape = str(attributes["shape"])
    rows = int(shape.partition("m = ")[2].partition(",")[0])
    columns = int(shape.partition("n = ")[2].partition(">")[0])
    if (rows, columns, kind) != (8, 8, "b16"):
        raise UnsupportedError(
            f"matrices of {rows} x {columns} elements {kind}",
            expected="8 x 8 elements of 16 bits",
        )
    transposed = ".trans" if _word(attributes["layout"]) == "col" else ""
    return f"sync.aligned.m8n8.x{count}{transposed}.shared.b16"


def _load_matrices(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    count = attributes["num"].value
    words = _matrix_words(attributes, count, _word(attributes["eltType"]))
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.{words} {{{names}}}, [${count}];"
    type_ = emitter.result_type(operation)
    value = _assembly(emitter, text, emitter.operands(operation), count, type_)
    emitter.bind(operation, type_, value)


def _store_matrices(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    operands = emitter.operands(operation)
    count = len(operands) - 1
    words = _matrix_words(attributes, count, _word(attributes["eltType"]))
    names = ", ".join(f"${i + 1}" for i in range(count))
    _assembly(emitter, f"stmatrix.{words} [$0], {{{names}}};", operands)


def _wait_bulk(emitter: Emitter, operation: Any) -> None:
    attributes = operation.attributes
    kind = ".read" if "read" in attributes else ""
    _assembly(emitter, f"cp.async.bulk.wait_group{kind} {attributes['group'].value};")


_REGISTERS = ("laneid", "warpid", "smid", "clusterid", "nclusterid") + tuple(
    f"{name}.{dimension}"
    for name in ("tid", "ntid", "ctaid", "nctaid", "cluster.ctaid", "cluster.nctaid", "clusterid")
    for dimension in "xyz"
)

GPU: dict[str, Handler] = {
    "gpu.thread_id": _id("tid"),
    "gpu.block_dim": _id("ntid"),
    "gpu.block_id": _id("ctaid"),
    "gpu.grid_dim": _id("nctaid"),
    "gpu.cluster_id": _id("clusterid"),
    "gpu.cluster_dim": _id("nclusterid"),
    "gpu.cluster_block_id": _id("cluster.ctaid"),
    "gpu.cluster_dim_blocks": _id("cluster.nctaid"),
    "gpu.lane_id": _lane,
    "gpu.barrier": _statement("bar.sync 0;"),
    "nvvm.barrier0": _statement("bar.sync 0;"),
    "nvvm.bar.warp.sync": _warp_barrier,
    "nvvm.cluster.arrive": _cluster_barrier("arrive"),
    "nvvm.cluster.arrive.relaxed": _cluster_barrier("arrive.relaxed"),
    "nvvm.cluster.wait": _cluster_barrier("wait"),
    "nvvm.fence.proxy": _fence_proxy,
    "nvvm.elect.sync": _elect,
    "nvvm.shfl.sync": _shuffle,
    "nvvm.redux.sync": _reduce,
    "nvvm.vote.sync": _vote,
    "nvvm.mapa": _map_to_block,
    "nvvm.ldmatrix": _load_matrices,
    "nvvm.stmatrix": _store_matrices,
    "nvvm.cp.async.bulk.commit.group": _statement("cp.async.bulk.commit_group;"),
    "nvvm.cp.async.bulk.wait_group": _wait_bulk,
    **{f"nvvm.read.ptx.sreg.{name}": _read_register for name in _REGISTERS},
}
