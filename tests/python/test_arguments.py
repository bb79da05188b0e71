"""Wrong types, shapes, memory and times: an exception names the argument, and nothing is begun."""

from __future__ import annotations

import array
import ctypes
import mmap
import os
from typing import Any

import pytest
import troupe
from conftest import (
    PATIENCE,
    SENT,
    TOKENS,
    Pair,
    Supervisor,
    deployment,
    grouped_layout,
    opaque_layout,
    small_layout,
)
from troupe import _dlpack


class Tensor:
    """The part of a torch tensor's interface that is used."""

    def __init__(self, memory: bytearray, *, contiguous: bool = True, is_cuda: bool = False) -> None:
        self._memory = troupe.Memory.of(memory)
        self._contiguous = contiguous
        self.is_cuda = is_cuda
        self.shape = (len(memory) // 2,)

    def data_ptr(self) -> int:
        return self._memory.address

    def numel(self) -> int:
        return self._memory.size // 2

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self._contiguous

    def stride(self) -> tuple[int, ...]:
        return (1,)


class Storage:
    def __init__(self, memory: bytearray, *, is_cuda: bool = False) -> None:
        self._memory = troupe.Memory.of(memory)
        self.is_cuda = is_cuda

    def data_ptr(self) -> int:
        return self._memory.address

    def nbytes(self) -> int:
        return self._memory.size


class Interface:
    """An array that is recognised by its interface alone."""

    def __init__(
        self, address: int, size: int, *, readonly: bool = False, strides: tuple[int, ...] | None = None
    ) -> None:
        self.__array_interface__ = {
            "shape": (size // 2,),
            "typestr": "<u2",
            "data": (address, readonly),
            "strides": strides,
            "version": 3,
        }


class CudaInterface:
    """An array of a GPU that is recognised by its interface alone."""

    def __init__(self, memory: bytearray) -> None:
        self.__cuda_array_interface__ = Interface(troupe.Memory.of(memory).address, len(memory)).__array_interface__


class Exporter:
    """A tensor of 16-bit elements that is recognised by DLPack alone, and counts how often it was released."""

    def __init__(
        self,
        memory: bytearray,
        *,
        versioned: bool = True,
        strides: tuple[int, ...] | None = (1,),
        readonly: bool = False,
        device: int = 1,
        major: int = 1,
        offset: int = 0,
    ) -> None:
        self._versioned, self._device, self.given_back = versioned, device, 0
        shape = ((len(memory) - offset) // 2,) if strides is None or len(strides) == 1 else (2, 3)
        self._memory = memory  # the numbers that the tensor points to
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        tensor = _dlpack._DLTensor(
            data=troupe.Memory.of(memory).address,
            device_type=device,
            ndim=len(shape),
            code=1,
            bits=16,
            lanes=1,
            shape=ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            strides=ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)) if self._strides else None,
            byte_offset=offset,
        )
        self._tensor: Any = (
            _dlpack._Versioned(major=major, flags=int(readonly), tensor=tensor) if versioned else tensor
        )
        self._end = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._give_back)

    def _give_back(self, _capsule: int) -> None:
        self.given_back += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device, 0)

    def __dlpack__(self, **options: object) -> object:
        if not self._versioned and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._name = b"dltensor_versioned" if self._versioned else b"dltensor"
        return new(ctypes.addressof(self._tensor), self._name, ctypes.cast(self._end, ctypes.c_void_p))


@pytest.mark.parametrize("versioned", [True, False])
def test_a_tensor_of_dlpack_is_held_as_long_as_its_memory_is(versioned: bool) -> None:
    held = bytearray(64)
    tensor = Exporter(held, versioned=versioned, offset=16)
    found = troupe.Memory.of(tensor)
    assert (found.address, found.size) == (troupe.Memory.of(held).address + 16, 48)
    assert tensor.given_back == 0
    del found
    assert tensor.given_back == 1
    assert troupe.Memory.of(Exporter(bytearray(8), strides=None)).size == 8
    assert troupe.Memory.of(Exporter(bytearray(12), strides=(3, 1))).size == 12
    assert troupe.Memory.of(Exporter(bytearray(8), readonly=True), writable=False).size == 8


def test_memory_is_found_in_whatever_holds_it() -> None:
    held = bytearray(64)
    where = troupe.Memory.of(held)
    assert where.size == 64
    held_too = array.array("I", range(16))
    assert troupe.Memory.of(held_too).address == held_too.buffer_info()[0]
    assert troupe.Memory.of(memoryview(held)[8:]).address == where.address + 8
    assert troupe.Memory.of(mmap.mmap(-1, 4096)).size == 4096
    for stands_for in (Tensor(held), Storage(held), Interface(where.address, 64), where):
        found = troupe.Memory.of(stands_for)
        assert (found.address, found.size) == (where.address, 64)
    assert troupe.Memory.of(b"read", writable=False).size == 4


def test_memory_knows_whether_it_is_said_to_be_of_a_gpu() -> None:
    held = bytearray(64)
    for stands_for in (held, Tensor(held), Storage(held), Exporter(held), Exporter(held, device=3)):
        assert not troupe.Memory.of(stands_for).on_gpu
    for of_gpu in (
        Tensor(held, is_cuda=True),
        Storage(held, is_cuda=True),
        CudaInterface(held),
        Exporter(held, device=2),
        Exporter(held, device=10),
    ):
        found = troupe.Memory.of(of_gpu)
        assert (found.on_gpu, found.size) == (True, 64)


def test_a_cache_on_a_gpu_that_the_library_cannot_reach_is_refused(supervisor: Supervisor) -> None:
    """Simulates a library built without GPU code. Otherwise each load would fail, far from here."""
    cache = Tensor(bytearray(small_layout().region_sizes()[0]), is_cuda=True)
    with pytest.raises(troupe.TroupeError, match=r"the cache is in memory of a GPU.*TROUPE_GPU=cuda") as raised:
        troupe.Engine("prefill-0", text=supervisor.text, layout=small_layout(), regions=[cache])
    assert raised.value.code == troupe.ErrorCode.NO_DEVICE


def test_a_value_on_a_gpu_needs_code_for_gpus(pair: Pair) -> None:
    [reason] = [one["reason"] for one in pair.decode.report()["backends"] if one["name"] == "xgmi"]
    if not reason.startswith("not built"):
        pytest.skip("this library has code for GPUs")
    with pytest.raises(troupe.TroupeError, match=r"the value is in memory of a GPU.*TROUPE_GPU=cuda") as raised:
        pair.decode.put("prefill-0", "key", Tensor(bytearray(64), is_cuda=True))
    assert raised.value.code == troupe.ErrorCode.NO_DEVICE


def test_numpy_arrays_are_memory() -> None:
    numpy = pytest.importorskip("numpy", reason="this Python has no numpy")
    values = numpy.zeros((4, 8), dtype=numpy.float16)
    found = troupe.Memory.of(values)
    assert (found.address, found.size) == (values.ctypes.data, 64)
    with pytest.raises(ValueError, match="not contiguous"):
        troupe.Memory.of(values[:, ::2])
    values.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        troupe.Memory.of(values)


def test_a_resizable_buffer_stays_as_it_is_while_it_is_lent() -> None:
    held = bytearray(64)
    lent = troupe.Memory.of(held)
    with pytest.raises(BufferError):
        held.extend(b"more")
    del lent
    held.extend(b"more")


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (b"read", ValueError, "read-only"),
        (memoryview(bytearray(8))[::2], ValueError, "not contiguous"),
        (bytearray(), ValueError, "empty"),
        (7, TypeError, "int is no memory"),
        (None, TypeError, "NoneType is no memory"),
        (Tensor(bytearray(8), contiguous=False), ValueError, r"untyped_storage\(\)"),
        (Interface(4096, 8, readonly=True), ValueError, "read-only"),
        (Interface(4096, 8, strides=(4,)), ValueError, "not contiguous"),
        (Interface(0, 8), ValueError, "no memory: 8 bytes at address 0"),
        (Exporter(bytearray(12), strides=(1, 2)), ValueError, "not contiguous"),
        (Exporter(bytearray(8), readonly=True), ValueError, "read-only"),
        (Exporter(bytearray(8), device=8), TypeError, "device of DLPack's type 8"),
        (Exporter(bytearray(8), major=2), TypeError, "DLPack 2"),
    ],
)
def test_what_is_no_memory_of_a_cache_says_why(what: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        troupe.Memory.of(what)


def test_a_layout_by_hand_is_the_one_that_was_made() -> None:
    made = small_layout()
    by_hand = troupe.Layout(made.layers(), dtype="bf16", block_tokens=4, blocks=8)
    assert by_hand.encode() == made.encode()
    assert troupe.Layout.decode(made.encode()).layers() == made.layers()
    by_hand.check_compatible(made)
    assert (made.dtype, made.element_size, made.block_tokens, made.blocks) == ("bf16", 2, 4, 8)
    assert (made.tp_rank, made.tp_size) == (0, 1)
    by_hand.validate(made.region_sizes())


def test_a_layout_that_is_none_names_the_field() -> None:
    shape = troupe.LayerShape(kv_heads=2, head_dim=8)
    with pytest.raises(troupe.TroupeError, match="the size of `mine` is not known"):
        troupe.Layout.packed([shape], dtype="mine", block_tokens=4, blocks=8)
    with pytest.raises(troupe.TroupeError, match="block_tokens"):
        troupe.Layout.packed([shape], dtype="bf16", block_tokens=5000, blocks=8)
    with pytest.raises(ValueError, match="blocks is -1"):
        troupe.Layout.packed([shape], dtype="bf16", block_tokens=4, blocks=-1)
    with pytest.raises(ValueError, match="order is 'sideways'"):
        troupe.Layout.packed(
            [shape], dtype="bf16", block_tokens=4, blocks=8, arrangement=troupe.Arrangement(order="sideways")
        )
    with pytest.raises(TypeError, match="dtype is a str"):
        troupe.Layout.packed([shape], dtype=16, block_tokens=4, blocks=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null character"):
        troupe.Layout.packed([shape], dtype="bf\0", block_tokens=4, blocks=8)
    with pytest.raises(troupe.TroupeError) as why:
        small_layout().validate([16])
    assert why.value.code == troupe.ErrorCode.OUT_OF_RANGE
    other = troupe.Layout.packed([shape] * 3, dtype="bf16", block_tokens=4, blocks=8)
    with pytest.raises(troupe.TroupeError) as unlike:
        small_layout().check_compatible(other)
    assert unlike.value.code == troupe.ErrorCode.LAYOUT_MISMATCH


def test_what_layers_and_the_model_say_comes_back() -> None:
    model = bytes([0xAB, 0, 0xCD, *bytes(29)])
    made = opaque_layout(model=model)
    for layout in (made, troupe.Layout.decode(made.encode())):
        assert layout.model == model
        shape, packed = layout.layers()[1]
        assert shape == troupe.LayerShape(
            troupe.LayerKind.OPAQUE, kv_heads=2, packing="tiles", unit=troupe.OpaqueUnit.BLOCK_HEAD
        )
        assert isinstance(shape.unit, troupe.OpaqueUnit)
        assert [plane.head_bytes for plane in packed] == [24]
    by_hand = troupe.Layout(made.layers(), dtype="bf16", block_tokens=4, blocks=8, model=model)
    assert by_hand.encode() == made.encode()
    assert by_hand.region_sizes() == [8 * 256, 8 * 48]
    by_hand.validate(by_hand.region_sizes())
    assert made.locate(SENT, layer=1, plane=0, token=6, head=1) == (1, 24, 24)  # any token of a block is all of it
    own_type = troupe.LayerShape(kv_heads=2, head_dim=8, value_dim=4, dtype="fp8")
    mixed = troupe.Layout.packed([own_type], dtype="bf16", block_tokens=4, blocks=8, model=model)
    ((shape, planes),) = mixed.layers()
    assert (shape.value_dim, shape.dtype, shape.element_size) == (4, "fp8", 1)
    assert (shape.packing, shape.unit) == ("", troupe.OpaqueUnit.NONE)
    assert [plane.head_bytes for plane in planes] == [8, 4]
    assert (mixed.dtype, mixed.element_size, mixed.model) == ("bf16", 2, model)
    assert small_layout().model == opaque_layout(model=bytes(32)).model == b""


def test_states_are_spread_part_by_part() -> None:
    def with_state(*parts: troupe.StatePart) -> troupe.Layout:
        state = troupe.StateTensor("conv", region=1, slots=2, base=0, slot_stride=40, slot_bytes=40, parts=parts)
        return troupe.Layout(small_layout().layers(), dtype="bf16", block_tokens=4, blocks=8, states=[state])

    made = with_state(troupe.StatePart(32, sliced=True), troupe.StatePart(8))
    with pytest.raises(troupe.TroupeError, match="state 0 parts is 2 here and 1"):
        made.check_compatible(with_state())
    with pytest.raises(troupe.TroupeError, match="the sum of its parts, 8"):
        with_state(troupe.StatePart(8))
    with pytest.raises(ValueError, match="size is -1"):
        with_state(troupe.StatePart(-1))


def test_groups_of_layers_come_back_and_are_named_where_they_are_none() -> None:
    made = grouped_layout()
    for layout in (made, troupe.Layout.decode(made.encode())):
        assert layout.groups() == [troupe.LayerGroup((0, 2), 4), troupe.LayerGroup((1, 3), 4)]
    assert small_layout().groups() == []
    made.validate(made.region_sizes())
    layers = made.layers()

    def refused(*groups: troupe.LayerGroup) -> str:
        with pytest.raises(troupe.TroupeError) as why:
            troupe.Layout(layers, dtype="bf16", block_tokens=4, blocks=8, groups=groups)
        assert why.value.code == troupe.ErrorCode.INVALID_CONFIG
        return why.value.reason

    assert "layer 3 group is none" in refused(troupe.LayerGroup((0, 2)), troupe.LayerGroup((1,)))
    assert "group 1 layer is 2" in refused(troupe.LayerGroup((0, 2)), troupe.LayerGroup((1, 2, 3)))
    assert "group 0 layer is 4" in refused(troupe.LayerGroup((0, 4)))
    assert "group 0 block_tokens is 1025" in refused(troupe.LayerGroup((0, 1, 2, 3), 1025))
    with pytest.raises(ValueError, match="a layer"):
        refused(troupe.LayerGroup((-1,)))
    unlike = troupe.Layout(layers, dtype="bf16", block_tokens=4, blocks=8, groups=[troupe.LayerGroup((0, 1, 2, 3))])
    with pytest.raises(troupe.TroupeError, match="number of groups of layers is 2 here and 1"):
        made.check_compatible(unlike)


def test_a_part_of_a_model_comes_back_and_is_named_where_it_is_none() -> None:
    shapes = [troupe.LayerShape(kv_heads=2, head_dim=8)] * 2
    made = troupe.Layout.packed(shapes, dtype="bf16", block_tokens=4, blocks=8, first_layer=3, total_layers=8)
    by_hand = troupe.Layout(made.layers(), dtype="bf16", block_tokens=4, blocks=8, first_layer=3, total_layers=8)
    assert by_hand.encode() == made.encode()
    for layout in (made, troupe.Layout.decode(made.encode())):
        assert (layout.first_layer, layout.total_layers) == (3, 8)
        assert len(layout.layers()) == 2
    assert (small_layout().first_layer, small_layout().total_layers) == (0, 0)
    whole = troupe.Layout.packed(shapes * 4, dtype="bf16", block_tokens=4, blocks=8, total_layers=8)
    assert made.fingerprint() == whole.fingerprint()
    made.check_compatible(whole)
    groups = [troupe.LayerGroup((0, 1)), troupe.LayerGroup(())]  # another part has layers of the second group
    grouped = troupe.Layout(
        made.layers(), dtype="bf16", block_tokens=4, blocks=8, groups=groups, first_layer=3, total_layers=8
    )
    assert grouped.groups() == [troupe.LayerGroup((0, 1), 4), troupe.LayerGroup((), 4)]

    def refused(first_layer: int, total_layers: int) -> str:
        with pytest.raises(troupe.TroupeError) as why:
            troupe.Layout.packed(
                shapes, dtype="bf16", block_tokens=4, blocks=8, first_layer=first_layer, total_layers=total_layers
            )
        assert why.value.code == troupe.ErrorCode.INVALID_CONFIG
        return why.value.reason

    assert "first_layer is 7, expected 0 to 6" in refused(7, 8)
    assert "total_layers is 1, expected 2 to 2048" in refused(0, 1)
    assert "first_layer is 1, expected 0 where total_layers is 0" in refused(1, 0)
    with pytest.raises(ValueError, match="first_layer is -1"):
        refused(-1, 8)
    other = troupe.Layout.packed(shapes, dtype="bf16", block_tokens=4, blocks=8, first_layer=3, total_layers=9)
    with pytest.raises(troupe.TroupeError, match="number of layers is 8 here and 9"):
        made.check_compatible(other)


def test_opaque_layers_and_models_that_are_none_or_others_are_named() -> None:
    with pytest.raises(troupe.TroupeError, match="layer 1 packing"):
        opaque_layout("")
    with pytest.raises(troupe.TroupeError, match="layer 1 packing"):
        opaque_layout("p" * 33)
    opaque, _ = opaque_layout().layers()[1]
    with pytest.raises(troupe.TroupeError, match="layer 0 is opaque"):
        troupe.Layout.packed([opaque], dtype="bf16", block_tokens=4, blocks=8)
    no_unit = troupe.LayerShape(troupe.LayerKind.OPAQUE, packing="tiles", unit=3)  # type: ignore[arg-type]
    with pytest.raises(troupe.TroupeError, match=r"`details\.unit` is 3"):
        troupe.Layout([(no_unit, [])], dtype="bf16", block_tokens=4, blocks=8)
    own_type = troupe.LayerShape(kv_heads=2, head_dim=8, dtype="mine")
    with pytest.raises(troupe.TroupeError, match=r"`details\.element_size` is 0 and the size of `mine` is not known"):
        troupe.Layout.packed([own_type], dtype="bf16", block_tokens=4, blocks=8)
    with pytest.raises(ValueError, match="model has 3 bytes; give 32 or none"):
        opaque_layout(model=b"abc")
    with pytest.raises(TypeError, match="model is bytes, not str"):
        opaque_layout(model="a" * 32)  # type: ignore[arg-type]

    def mismatch(here: troupe.Layout, there: troupe.Layout) -> str:
        with pytest.raises(troupe.TroupeError) as unlike:
            here.check_compatible(there)
        assert unlike.value.code == troupe.ErrorCode.LAYOUT_MISMATCH
        return unlike.value.reason

    assert "layer 1 packing is 'tiles' here and 'planes'" in mismatch(opaque_layout(), opaque_layout("planes"))
    one, two = opaque_layout(model=b"\1" * 32), opaque_layout(model=b"\2" * 32)
    assert "the hash of the model is 0101010101010101" in mismatch(one, two)
    assert one.fingerprint() != two.fingerprint()
    one.check_compatible(opaque_layout())  # this one does not name its model


def test_layouts_have_one_fingerprint_if_they_are_of_one_shape() -> None:
    shapes = [troupe.LayerShape(kv_heads=2, head_dim=8)] * 2
    plain = small_layout().fingerprint()
    other_strides = troupe.Layout.packed(
        shapes, dtype="bf16", block_tokens=4, blocks=9, arrangement=troupe.Arrangement("blocks_first", head_major=True)
    )
    assert len(plain) == 16
    assert plain != bytes(16)
    assert other_strides.encode() != small_layout().encode()
    assert other_strides.fingerprint() == plain
    other_dtype = troupe.Layout.packed(shapes, dtype="fp16", block_tokens=4, blocks=8)
    assert other_dtype.fingerprint() != plain
    assert troupe.Layout.decode(small_layout().encode()).fingerprint() == plain


def test_engines_that_cannot_start_say_why() -> None:
    text = deployment(9)
    layout = small_layout()
    with pytest.raises(ValueError, match="by file or by text"):
        troupe.Engine("prefill-0")
    with pytest.raises(ValueError, match="name a node of the deployment, or give join"):
        troupe.Engine(text=text)
    with pytest.raises(troupe.TroupeError, match="prefill-7") as unknown:
        troupe.Engine("prefill-7", text=text)
    assert unknown.value.code == troupe.ErrorCode.NOT_FOUND
    with pytest.raises(troupe.TroupeError, match="deployment:1"):
        troupe.Engine("prefill-0", text="nonsense: 1\n")
    with pytest.raises(troupe.TroupeError, match="/no/such/file"):
        troupe.Engine("prefill-0", file="/no/such/file")
    with pytest.raises(troupe.TroupeError) as small:
        troupe.Engine("prefill-0", text=text, layout=layout, regions=[bytearray(64)])
    assert small.value.code == troupe.ErrorCode.OUT_OF_RANGE
    with pytest.raises(TypeError, match="put a single region into a list"):
        troupe.Engine("prefill-0", text=text, layout=layout, regions=bytearray(4096))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"layout is a troupe\.Layout"):
        troupe.Engine("prefill-0", text=text, layout="bf16", regions=[bytearray(4096)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="supervisor is 'there'"):
        troupe.Engine("prefill-0", text=text, supervisor="there")
    with pytest.raises(ValueError, match="allocate is 'much'"):
        troupe.Engine("prefill-0", text=text, layout=layout, allocate="much")


def test_blocks_come_in_whatever_holds_numbers(pair: Pair) -> None:
    words, signed = array.array("I", [5, 8]), array.array("q", [5, 8])
    for numbers in ([5, 8], (5, 8), range(5, 9), iter([5, 8]), words, signed, memoryview(signed)):
        with pytest.raises(troupe.TroupeError, match="block 8") as outside:
            pair.prefill.send("r", numbers)
        assert outside.value.code == troupe.ErrorCode.OUT_OF_RANGE


def test_wrong_arguments_of_operations_begin_nothing(pair: Pair) -> None:
    engine = pair.prefill
    for blocks, error in (
        ([-1], ValueError),
        ([2**32], ValueError),
        (["a"], TypeError),
        ("12", TypeError),
        (b"12", TypeError),
        (7, TypeError),
        (array.array("d", [1.0]), TypeError),
        (array.array("q", [-1]), ValueError),
    ):
        with pytest.raises(error, match="blocks are "):
            engine.send("r", blocks)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="request is a str"):
        engine.send(b"r", SENT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="deadline is -1"):
        engine.send("r", SENT, deadline=-1)
    with pytest.raises(TypeError, match="held_for is a sequence"):
        engine.send("r", SENT, held_for="decode-0")
    with pytest.raises(troupe.TroupeError) as outside:
        engine.send("r", [8])
    assert outside.value.code == troupe.ErrorCode.OUT_OF_RANGE
    with pytest.raises(ValueError, match="mode is 'push'"):
        engine.receive("r", sources=["prefill-0"], tokens=4, mode="push")
    with pytest.raises(TypeError, match="tokens is an int"):
        engine.receive("r", sources=["prefill-0"], tokens=4.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="request is a str"):
        engine.receive(sources=["prefill-0"], tokens=4)
    send = engine.send("r", array.array("I", SENT))
    with pytest.raises(ValueError, match="token_end is -1"):
        engine.layers_ready(send, 0, 1, -1)
    with pytest.raises(troupe.TroupeError) as far:
        engine.layers_ready(send, 0, 3, TOKENS)
    assert far.value.code == troupe.ErrorCode.OUT_OF_RANGE
    with pytest.raises(ValueError, match="an IPC handle has 64"):
        engine.layers_ready(send, 0, 1, TOKENS, shared_event=b"short")
    with pytest.raises(ValueError, match="max_events is 0"):
        engine.take(0)
    engine.abort(send)
    with pytest.raises(troupe.TroupeError):
        engine.wait(send, PATIENCE)
    assert engine.report()["operations_open"] == 0


def test_calls_after_stop_are_refused_and_nothing_is_lost(pair: Pair) -> None:
    send = pair.send()
    pair.prefill.stop()
    pair.prefill.stop()
    with pytest.raises(troupe.TroupeError) as gone:
        pair.prefill.wait(send, PATIENCE)
    assert gone.value.code == troupe.ErrorCode.ABORTED
    with pytest.raises(troupe.TroupeError) as late:
        pair.send("late")
    assert late.value.code == troupe.ErrorCode.ABORTED
    assert pair.prefill.take() == []
    assert pair.prefill.identity().incarnation != 0
    assert pair.prefill.report()["name"] == "prefill-0"


def test_identity_says_who_it_is(pair: Pair, supervisor: Supervisor) -> None:
    identity = pair.prefill.identity()
    cluster = troupe.Cluster(text=supervisor.text, timeout=PATIENCE)
    members = {node["name"]: node for node in cluster.members()["nodes"]}
    assert int(members["prefill-0"]["incarnation"], 16) == identity.incarnation
    assert members["prefill-0"]["port"] == identity.port
    assert pair.prefill.draining() == "serving"
    assert troupe.library_version()
    assert troupe.protocol_version() > 0


def test_an_engine_on_cores_that_it_may_not_use_is_refused(supervisor: Supervisor) -> None:
    with pytest.raises(troupe.TroupeError, match="core 60000 is not one") as refused:
        troupe.Engine("prefill-0", text=supervisor.text, layout=small_layout(), allocate="ordinary", cores=[60_000])
    assert refused.value.code == troupe.ErrorCode.INVALID_CONFIG
    core = min(os.sched_getaffinity(0))
    with troupe.Engine(
        "prefill-0", text=supervisor.text, layout=small_layout(), allocate="ordinary", cores={core}
    ) as engine:
        engine.wait_registered(PATIENCE)


def test_memory_is_found_whatever_others_make_of_the_interpreters_functions() -> None:
    theirs = [ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release]
    before = [function.argtypes for function in theirs]
    try:
        for function in theirs:
            function.argtypes = [ctypes.c_double]
        value = b"read only"
        found = troupe.Memory.of(value, writable=False)
        assert ctypes.string_at(found.address, found.size) == value
    finally:
        for function, types in zip(theirs, before, strict=True):
            function.argtypes = types
