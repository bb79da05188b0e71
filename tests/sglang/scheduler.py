"""Scheduler processes of SGLang servers without their models: SGLang's own classes, host memory with known bytes,
and functions of this file that a test runs in them.
"""
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import socket
import tempfile
import time

from nursery import PATIENCE, obey

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)  # KVPoll
POISON = 0xEE


def until(happens, said, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < limit, said
        time.sleep(0.005)
    return found


# -- processes


def import_sglang():
    # pylint: disable=unused-import,import-outside-toplevel
    import torch

    import troupe.sglang.bootstrap
    import troupe.sglang.receiver
    import troupe.sglang.sender  # noqa: F401
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    backend()
    with tempfile.TemporaryDirectory() as folder:
        context_of("prefill", MODEL, folder)  # imports now what SGLang imports late


def serve(pipe):
    from troupe.engine import configure_logging
    log = os.environ.get("TROUPE_TEST_LOG", "off")  # of Troupe; SGLang's lines come with it
    configure_logging(level=log)
    logging.disable(logging.CRITICAL if log == "off" else logging.NOTSET)
    obey(pipe, {})  # the schedulers, by their names


# -- the model, and the bytes of a room

MODEL = {"kind": "mha", "heads": 4, "layers": 4, "head_bytes": 32, "value_bytes": 32, "page_size": 16, "pages": 64,
         "dtype": "bfloat16", "drafts": 0, "states": (), "hidden": 16}


def config_of(model, folder):
    """A model of SGLang's, of which only the numbers of layers and heads matter."""
    said = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
            "num_attention_heads": 16, "num_key_value_heads": model["heads"], "num_hidden_layers": model["layers"],
            "vocab_size": 1000, "max_position_embeddings": 65536, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
            "rope_theta": 1e4, "hidden_act": "silu"}
    path = tempfile.mkdtemp(dir=folder)
    pathlib.Path(path, "config.json").write_text(json.dumps(said))
    return path


def reference(*what, size):
    """Bytes that are the same in every process, and differ for other arguments."""
    import numpy as np
    seed = int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest())
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size=size, dtype=np.uint8)


def context_of(mode, model, folder, *, tp=(0, 1), pp=(0, 1), dp=(0, 1), **more):
    """The settings that SGLang publishes in the process of a rank. `dp`: with data-parallel attention, where a
    replica is one rank."""
    from sglang.srt.runtime_context import SpawnRanks, create_context
    from sglang.srt.server_args import ServerArgs
    if dp[1] > 1:
        tp, more = dp, {**more, "enable_dp_attention": True}
    arguments = ServerArgs(model_path=config_of(model, folder), skip_tokenizer_init=True, device="cpu", host="127.0.0.1",
                           disaggregation_mode=mode, disaggregation_transfer_backend="troupe", load_format="dummy",
                           tp_size=tp[1], pp_size=pp[1], dp_size=dp[1], **more)
    ranks = SpawnRanks(world_rank=pp[0] * tp[1] + tp[0], gpu_id=0, dp_rank=None)
    return create_context(arguments, role="scheduler", ranks=ranks)


class Group:
    """A pipeline group, of which SGLang's store needs one property."""

    def __init__(self, file):
        self.file = pathlib.Path(file)

    def broadcast_object(self, thing, src=0):
        if thing is not None:
            fresh = self.file.with_suffix(".new")
            fresh.write_text(json.dumps(thing))
            fresh.replace(self.file)
        until(self.file.exists, "rank 0 of the pipeline says nothing")
        return json.loads(self.file.read_text())


class Scheduler:
    """One rank of a server: its memory, its manager, and its requests by room."""

    def __init__(self, mode, *, model, folder, http, bootstrap, tp=(0, 1), pp=(0, 1), dp=(0, 1), group=None, slots=8):
        import numpy as np
        from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, MetadataBuffers, get_kv_class
        import torch
        self.mode, self.model = mode, {**MODEL, **model}
        self.tp, self.pp, self.dp = tp, pp, dp
        self.context = context_of(mode, self.model, folder, tp=tp, pp=pp, dp=dp, port=http,
                                  disaggregation_bootstrap_port=bootstrap)
        self.context.parallel.override_permanently(pp_group=Group(group) if group else None)
        layers = self.layers = self._layers()
        self.heads = self._heads()
        rows = self.model["pages"] * self.model["page_size"]
        # The order of a token's bytes: [layer][keys, values][token of the cache][head][byte].
        planes = ("latent",) if self.model["kind"] == "mla" else ("keys", "values")
        sizes = {"latent": self.model["head_bytes"], "keys": self.model["head_bytes"], "values": self.model["value_bytes"]}
        self.planes = {(layer, plane): np.full((rows, len(self.heads), sizes[plane]), POISON, dtype=np.uint8)
                       for plane in planes for layer in layers}
        self.states = [self._state(kind) for kind in self.model["states"]]
        self.metadata = MetadataBuffers(slots, self.model["hidden"], torch.float32, 1, custom_mem_pool=None)
        self.free = list(range(1, self.model["pages"]))  # SGLang never allocates page 0
        np.random.Generator(np.random.PCG64(pp[0] * tp[1] + tp[0] + http)).shuffle(self.free)
        self.rooms = {}
        self.requests = []
        with self.in_context():
            self.backend = backend()
            kinds = KVClassType
            self.sender_class, self.receiver_class = (get_kv_class(self.backend, kind)
                                                      for kind in (kinds.SENDER, kinds.RECEIVER))
            manager_class = get_kv_class(self.backend, kinds.MANAGER)
            self.manager = manager_class(self._args(), DisaggregationMode(mode), self.context.server_args,
                                         self.model["kind"] == "mla" and not self.model.get("hybrid"))

    @contextlib.contextmanager
    def in_context(self):
        from sglang.srt.runtime_context import use_context
        with use_context(self.context):
            yield

    def _layers(self):
        from sglang.srt.distributed.utils import get_pp_indices
        begin, end = get_pp_indices(self.model["layers"], *self.pp)
        return [*range(begin, end), *(f"draft {i}" for i in range(self.model["drafts"]))]

    def _heads(self):
        """The model's heads that this rank holds, by SGLang's rule."""
        (rank, ranks), heads = self.tp, 1 if self.model["kind"] == "mla" else self.model["heads"]
        if self.model["kind"] == "mla":
            return [0]
        return list(range(rank * heads // ranks, (rank + 1) * heads // ranks)) or [rank * heads // ranks]

    # -- states: (name, buffers [item][bytes], the description for SGLang)

    def _state(self, kind):
        import numpy as np
        (rank, ranks), page = self.tp, self.model["page_size"]
        items = self.model.get("items", 24)
        if kind == "mamba":
            # For each layer: a convolution of 3 rows [q, k, v], which is sliced in three, a state sliced by heads,
            # and a state that every rank holds.
            whole = {"conv": [16, 16, 32], "heads": 64, "same": 24}
            buffers, dims, groups, outer, ids = [], [], [], [], []
            for layer in self.layers:
                conv = sum(whole["conv"]) // ranks
                for what, size, dim, group, count in (("conv", 3 * 2 * conv, conv, whole["conv"], 3),
                                                      ("heads", whole["heads"] // ranks * 4, whole["heads"] // ranks, None, 1),
                                                      ("same", whole["same"], 0, None, 1)):
                    buffers.append((layer, what, np.full((items, size), POISON, dtype=np.uint8)))
                    dims.append(dim)
                    groups.append(group)
                    outer.append(count)
                    ids.append(layer)
            return {"kind": kind, "buffers": buffers, "dims": dims, "groups": groups, "outer": outer, "ids": ids,
                    "rank": rank, "ranks": ranks}
        if kind == "dsa":
            count = self.model["pages"]
            return {"kind": kind, "buffers": [(layer, "index", np.full((count, page * 6), POISON, dtype=np.uint8))
                                              for layer in self.layers]}
        if kind == "swa":
            heads = len(self._heads())
            return {"kind": kind, "buffers": [(layer, what, np.full((items, page * heads * 16), POISON, dtype=np.uint8))
                                              for what in ("keys", "values") for layer in range(2)]}
        return {"kind": kind, "buffers": [(0, "rows", np.full((items, 48), POISON, dtype=np.uint8))]}

    def state_bytes(self, state, layer, what, room, index, size):
        """The bytes of item `index` of a room."""
        import numpy as np
        kind = state["kind"]
        if kind == "mamba" and what == "conv":
            whole = [reference(room, layer, what, row, part, size=(size_of, 2))
                     for row in range(3) for part, size_of in enumerate((16, 16, 32))]
            rank, ranks = state["rank"], state["ranks"]
            return np.concatenate([part[len(part) * rank // ranks:len(part) * (rank + 1) // ranks].reshape(-1)
                                   for part in whole])
        if kind == "mamba" and what == "heads":
            return reference(room, layer, what, size=size * state["ranks"])[size * state["rank"]:size * (state["rank"] + 1)]
        if kind == "swa":
            every = reference(room, layer, what, index, size=(self.model["page_size"], self.model["heads"], 16))
            return every[:, self._heads(), :].reshape(-1)
        return reference(room, kind, layer, what, index, size=size)

    def _args(self):
        from sglang.srt.disaggregation.base.conn import KVArgs, StateType
        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = self.tp[0] + self.dp[0], self.pp[0], None, 0
        args.ib_device, args.rust_http_port = None, None
        args.kv_cache_dtype_str, args.page_size = self.model["dtype"], self.model["page_size"]
        args.kv_layer_ids = []
        drafts = [layer for layer in self.layers if isinstance(layer, str)]
        target = [layer for layer in self.layers if not isinstance(layer, str)]
        kinds = ("latent",) if self.model["kind"] == "mla" else ("keys", "values")
        order = [self.planes[layer, plane] for some in (target, drafts) for plane in kinds for layer in some]
        args.kv_data_ptrs = [plane.ctypes.data for plane in order]
        args.kv_data_lens = [plane.nbytes for plane in order]
        args.kv_item_lens = [plane[0].nbytes * self.model["page_size"] for plane in order]
        args.num_draft_entries = len(drafts) * len(kinds)
        if self.mode == "prefill":
            args.prefill_start_layer = target[0]
            args.prefill_end_layer = target[-1] + 1
            if self.model["kind"] != "mla":
                args.kv_head_num, args.total_kv_head_num = len(self.heads), self.model["heads"]
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        known = {kind.value: kind for kind in StateType}
        args.state_types = [known.get(state["kind"], state["kind"]) for state in self.states]
        every = [[buffer for _, _, buffer in state["buffers"]] for state in self.states]
        args.state_data_ptrs = [[buffer.ctypes.data for buffer in buffers] for buffers in every]
        args.state_data_lens = [[buffer.nbytes for buffer in buffers] for buffers in every]
        args.state_item_lens = [[buffer[0].nbytes for buffer in buffers] for buffers in every]
        for name, key in (("state_dim_per_tensor", "dims"), ("state_conv_shard_groups", "groups"),
                          ("state_slice_outer_counts", "outer"), ("state_layer_ids", "ids")):
            setattr(args, name, [state.get(key, []) for state in self.states])
        args.swa_kv_cache_layout = "nhd" if "swa" in self.model["states"] else None
        args.is_hybrid_mla_backend, args.mla_compression_ratios = self.model.get("hybrid", False), None
        return args

    # -- pages

    def take(self, count):
        pages, self.free = self.free[:count], self.free[count:]
        assert len(pages) == count, "the cache of this scheduler is full"
        return pages

    def slots(self, pages, begin, end):
        """Where tokens [begin, end) of a request lie."""
        import numpy as np
        tokens = np.arange(begin, end)
        page = self.model["page_size"]
        return np.asarray(pages)[tokens // page] * page + tokens % page

    def write(self, room, pages, begin, end, flip=None):
        """Writes the computed bytes of the tokens. `flip`: a token whose bytes are wrong."""
        for (layer, plane), memory in self.planes.items():
            whole = self.bytes_of(room, layer, plane, end)
            where = self.slots(pages, begin, end)
            memory[where] = whole[begin:end][:, self.heads, :]
            if flip is not None and begin <= flip < end:
                memory[self.slots(pages, flip, flip + 1)] ^= 1

    def bytes_of(self, room, layer, plane, tokens):
        heads = 1 if self.model["kind"] == "mla" else self.model["heads"]
        size = self.model["value_bytes"] if plane == "values" else self.model["head_bytes"]
        return reference(room, layer, plane, size=(1024, heads, size))[:tokens]

    def wrong(self, room, pages, begin, end):
        """Which of these tokens' bytes differ from what was computed."""
        found = []
        for (layer, plane), memory in self.planes.items():
            whole = self.bytes_of(room, layer, plane, end)[begin:end][:, self.heads, :]
            there = memory[self.slots(pages, begin, end)]
            if not (there == whole).all():
                found.append((layer, plane, int((there != whole).any(axis=(1, 2)).sum())))
        return found

    def poison(self, pages):
        page = self.model["page_size"]
        for memory in self.planes.values():
            for number in pages:
                memory[number * page:(number + 1) * page] = POISON

    def is_poisoned(self, pages):
        page = self.model["page_size"]
        return all((memory[number * page:(number + 1) * page] == POISON).all()
                   for memory in self.planes.values() for number in pages)


def backend():
    """The member of SGLang's enum, as its own start-up code makes it."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry

    from troupe.plugins import sglang
    if "troupe" not in DISAGG_TRANSFER_BACKEND_CHOICES:
        sglang()
        HookRegistry.apply_hooks()
    return utils.TransferBackend("troupe")


# -- functions that processes run: `schedulers` are those of the process, by name


def start(schedulers, name, mode, **arguments):
    schedulers[name] = Scheduler(mode, **arguments)
    return schedulers[name].manager.nodes.names


def serve_bootstrap(schedulers, port):
    """The bootstrap server, as SGLang starts it in the process of its HTTP server."""
    from sglang.srt.managers.disagg_service import start_disagg_service
    from sglang.srt.runtime_context import use_context
    with tempfile.TemporaryDirectory() as folder:
        context = context_of("prefill", MODEL, folder, disaggregation_bootstrap_port=port)
        with use_context(context):
            schedulers["bootstrap"] = start_disagg_service()

    def answers():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    until(answers, "the bootstrap server does not listen")


def environment(_, **variables):
    os.environ.update(variables)


def stop(schedulers, name):
    schedulers.pop(name).manager.teardown()


class Request:
    def __init__(self, end):
        self.end = end
        self.pages = []
        self.tokens = self.prefix = self.sent = self.computed = 0
        self.index = -1
        self.initialised = self.finished = self.asked = False


def begin(schedulers, name, room, address):
    """Creates a sender or a receiver."""
    it = schedulers[name]
    with it.in_context():
        kind = it.sender_class if it.mode == "prefill" else it.receiver_class
        it.rooms[room] = Request(kind(it.manager, address, room))


def poll(schedulers, name, *rooms):
    """The statuses of these rooms, of which none may end SGLang's scheduler."""
    it = schedulers[name]
    statuses = []
    for room in rooms:
        request = it.rooms[room]
        if it.mode == "prefill" and it.pp[1] > 1 and not request.initialised:
            # The first part of a pipeline polls for all; the others are not polled.
            if it.pp[0] > 0:
                statuses.append(SUCCESS)
                continue
            status = int(request.end.poll_pp_consensus())
        else:
            with it.in_context():
                status = int(request.end.poll())
        statuses.append(status)
        if it.mode == "prefill":
            assert request.initialised or status <= WAITING, f"a sender in the bootstrap queue has status {status}"
            assert not request.initialised or status != BOOTSTRAPPING, "a sender in the inflight queue is bootstrapping"
        else:
            assert request.asked or status <= WAITING, f"a receiver without a destination has status {status}"
            if status == SUCCESS and request.index >= 0 and it.metadata.bootstrap_room[request.index, 0] == 0:
                raise AssertionError("a receiver is done, and its metadata are not there")
    return statuses if len(rooms) > 1 else statuses[0]


def finalize(schedulers, name, room, tokens):
    """As SGLang does when the sender waits for input. The tokens before the prefix are not sent."""
    it = schedulers[name]
    request, page = it.rooms[room], it.model["page_size"]
    with it.in_context():
        request.tokens, request.prefix = tokens, request.end.pop_decode_prefix_len()
        request.sent = request.prefix
        request.pages = request.pages or it.take(-(-tokens // page))
        request.index = room % it.metadata.bootstrap_room.shape[0]
        request.end.init(-(-(tokens - request.prefix) // page), request.index)
        request.initialised = True
    return request.prefix


def compute(schedulers, name, room, tokens, flip=None):
    """May be called before the bootstrap as well."""
    it = schedulers[name]
    request, page = it.rooms[room], it.model["page_size"]
    request.pages += it.take(max(0, -(-tokens // page) - len(request.pages)))
    it.write(room, request.pages, request.computed, tokens, flip)
    request.computed = tokens


def send(schedulers, name, room, upto, last=False, flip=None, states=None):
    """Sends a chunk as SGLang cuts it: every chunk but the last ends with a page."""
    import numpy as np
    it = schedulers[name]
    request, page = it.rooms[room], it.model["page_size"]
    if upto > request.computed:
        compute(schedulers, name, room, upto, flip)
    end = upto if last else upto - upto % page
    pages = np.asarray(request.pages[request.sent // page:-(-end // page)], dtype=np.int32)
    with it.in_context():
        if not request.end.should_send_kv_chunk(len(pages), last):
            return
        if last:
            it.metadata.output_ids[request.index][0] = room % 1000
            it.metadata.bootstrap_room[request.index, 0] = room
        indices = prepare_states(it, room, states or {}, write=True) if last and it.states else None
        request.end.send(pages, indices, num_kv_tokens=end - request.sent)
    request.sent = end


def prepare_states(it, room, states, write):
    """Indices of each state component, whose bytes are written at the prefill side."""
    import numpy as np
    lists = []
    for state in it.states:
        indices = states.get(state["kind"])
        if state["kind"] == "dsa":
            request = it.rooms[room]
            page = it.model["page_size"]
            indices = request.pages[request.prefix // page:-(-request.tokens // page)]
        lists.append(None if indices is None else np.asarray(indices, dtype=np.int32))
        for position, index in enumerate(indices or ()):
            for layer, what, buffer in state["buffers"]:
                if write:
                    buffer[index] = it.state_bytes(state, layer, what, room, position, buffer.shape[1])
    return lists


def wrong_states(schedulers, name, room, states):
    it, found = schedulers[name], []
    for state in it.states:
        indices = states.get(state["kind"])
        if state["kind"] == "dsa":
            request, page = it.rooms[room], it.model["page_size"]
            indices = request.pages[request.prefix // page:]
        for position, index in enumerate(indices or ()):
            for layer, what, buffer in state["buffers"]:
                if not (buffer[index] == it.state_bytes(state, layer, what, room, position, buffer.shape[1])).all():
                    found.append((state["kind"], layer, what, position))
    return found


def ensure(schedulers, name, address):
    """SGLang asks in the loop of its scheduler, which an exception would end."""
    it = schedulers[name]
    with it.in_context():
        return it.manager.try_ensure_parallel_info(address)


def init(schedulers, name, room, dp=0):
    it = schedulers[name]
    with it.in_context():
        it.rooms[room].end.init(dp)


def ask(schedulers, name, room, tokens, prefix=0, states=None):
    """Names the destination, as SGLang's `send_metadata` does. The tokens before the prefix are here already."""
    import numpy as np
    it = schedulers[name]
    request, page = it.rooms[room], it.model["page_size"]
    request.tokens, request.prefix = tokens, prefix
    request.pages = it.take(-(-tokens // page))
    it.poison(request.pages)
    it.write(room, request.pages, 0, prefix)
    request.index = room % it.metadata.bootstrap_room.shape[0]
    it.metadata.clear_slot(request.index)
    pages = np.asarray(request.pages[prefix // page:], dtype=np.int32)
    with it.in_context():
        request.asked = True
        lists = prepare_states(it, room, states or {}, write=False) if it.states else None
        request.end.send_metadata(pages, request.index, lists, decode_prefix_len=prefix)


def check(schedulers, name, room):
    """What differs in a room that has arrived."""
    it = schedulers[name]
    request = it.rooms[room]
    found = it.wrong(room, request.pages, 0, request.tokens)
    row = it.metadata.get_buf(request.index)
    if row[0][0].item() != room % 1000 or row[-1][0].item() != room:
        found.append(("row", row[0][0].item(), row[-1][0].item()))
    return found


def check_first(schedulers, name, room, tokens):
    """What differs in the first tokens of a room that is still in progress."""
    it = schedulers[name]
    return it.wrong(room, it.rooms[room].pages, 0, tokens)


def asked_by(schedulers, name, room):
    """How many decode ranks have asked this sender."""
    return len(schedulers[name].rooms[room].end._sends._wanted)


def abort(schedulers, name, room):
    it = schedulers[name]
    with it.in_context():
        it.rooms[room].end.abort()


def begin_and_abort(schedulers, name, room, address, count):
    """Begins requests so fast that Troupe is still busy with the first when the last one begins; the last is not
    aborted."""
    nodes, aborts = schedulers[name].manager.nodes, []
    nodes.abort = lambda *arguments: aborts.append(arguments)
    for _ in range(count):
        begin(schedulers, name, room, address)
        abort(schedulers, name, room)
        failure(schedulers, name, room)
    begin(schedulers, name, room, address)
    del nodes.abort
    for arguments in aborts:
        nodes.abort(*arguments)


def hear_nothing_of_nodes(schedulers, name):
    """Simulates the loss of the supervisor, which cannot be made to die between a registration and its news."""
    nodes = schedulers[name].manager.nodes
    nodes.page_size_of = lambda node: None
    nodes.is_member = lambda node: False


def withhold_unpinned(schedulers, name):
    """Simulates peers that take long to confirm that they write no more."""
    from troupe.events import Unpinned
    nodes = schedulers[name].manager.nodes
    nodes.withheld, handle = [], type(nodes)._handle

    def handle_others(cache, event):
        if isinstance(event, Unpinned):
            nodes.withheld.append((cache, event))
        else:
            handle(nodes, cache, event)

    nodes._handle = handle_others


def withheld(schedulers, name):
    return len(schedulers[name].manager.nodes.withheld)


def hand_over_unpinned(schedulers, name):
    nodes = schedulers[name].manager.nodes
    del nodes._handle
    with nodes.lock:
        for cache, event in nodes.withheld:
            nodes._handle(cache, event)


def failure(schedulers, name, room):
    """What SGLang's scheduler is told of a failed room: the reason, and whether it is another rank's."""
    it = schedulers[name]
    with it.in_context():
        try:
            it.rooms[room].end.failure_exception()
        except Exception as why:  # pylint: disable=broad-exception-caught
            return type(why).__name__, why.failure_reason, why.is_from_another_rank
    return None


def clear(schedulers, name, room):
    """Ends a room after success. Its pages are free."""
    it = schedulers[name]
    with it.in_context():
        it.rooms[room].end.clear()
    it.free += it.rooms.pop(room).pages


def clear_only(schedulers, name, room):
    it = schedulers[name]
    with it.in_context():
        it.rooms[room].end.clear()


def drop(schedulers, name, room):
    """Ends a room after a failure: SGLang frees the pages of a prefill server at once."""
    it = schedulers[name]
    request = it.rooms.pop(room)
    if it.mode == "prefill":
        it.poison(request.pages)
    it.free += request.pages


def hold(schedulers, name, room):
    """After a failure at a decode server: whether the pages may be reused, as SGLang asks."""
    it = schedulers[name]
    with it.in_context():
        it.rooms[room].end.ensure_abort_notified(force_arm=True)
        return it.manager.is_abort_release_safe(room, 1)


def poison(schedulers, name, room):
    it = schedulers[name]
    it.poison(it.rooms[room].pages)


def is_poisoned(schedulers, name, room):
    it = schedulers[name]
    return it.is_poisoned(it.rooms[room].pages)


def metric(schedulers, name, room):
    """The metrics, also as SGLang's own collector makes them."""
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
    found = schedulers[name].rooms[room].end.get_transfer_metric()
    stats = SchedulerReqTimeStats()
    return (found.transfer_latency_s, found.transfer_total_bytes,
            stats.compute_and_observe_kv_transfer_metrics(found))


def state_of(schedulers, name):
    """Counts of what the manager keeps."""
    manager = schedulers[name].manager
    rooms = getattr(manager.request_status, "_local_map", manager.request_status)
    return {"rooms": len(rooms), "sends": len(manager.sends), "receives": len(manager.receives),
            "receivers": len(manager.receivers), "records": len(manager.failure_records)}


def ports(schedulers):
    """The ports that this process listens on, and those that its managers announce."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    listening = set()
    for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            listening.add(int(words[1].split(":")[1], 16))
    return sorted(listening), [it.manager.rank_port for it in schedulers.values() if isinstance(it, Scheduler)]


def release_memory(schedulers, name):
    schedulers[name].manager.deregister_buffer_to_engine()


def known_prefills(schedulers, name):
    """The addresses that the manager keeps for its next requests."""
    manager = schedulers[name].manager
    return sorted({*manager.prefill_info_table, *manager.connection_pool})


def resume_memory(schedulers, name):
    it = schedulers[name]
    with it.in_context():
        it.manager.register_buffer_to_engine()




def yield_pages(schedulers, name, room):
    """SGLang's `optimistic_release_and_requeue`: another request takes the pages, the sender stays the same."""
    it = schedulers[name]
    request = it.rooms[room]
    it.poison(request.pages)
    it.free += request.pages
    request.pages, request.computed = [], 0


def forget_events(schedulers, name):
    """Acts like a frozen scheduler."""
    schedulers[name].manager.nodes._on_member = lambda event: None


def forget_troupe(schedulers, name):
    """Pretends that its ranks have another transfer backend."""
    schedulers["bootstrap"]._said.clear()


def say_of_troupe(schedulers, name, said):
    """What the bootstrap server says of all ranks."""
    schedulers["bootstrap"]._nodes_of = lambda dp: said


def interpreter_ends(schedulers, name):
    import atexit
    atexit._run_exitfuncs()
    nodes = schedulers[name].manager.nodes
    return nodes.stopped and not nodes._thread.is_alive()


def resolve_dp(schedulers, name, room, address):
    """SGLang's own way to find the data-parallel rank of a room."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    it = schedulers[name]

    class Queue:
        kv_manager = it.manager

    class Request:
        bootstrap_host, bootstrap_port = address.split(":")
        bootstrap_room, disagg_prefill_dp_rank = room, None

    return DecodePreallocQueue._resolve_prefill_dp_rank(Queue, Request)


def be_dummy(schedulers, name):
    """A context-parallel rank that sends nothing."""
    schedulers[name].manager.is_dummy_cp_rank = True


class Event:
    """The CUDA event interface, as far as a process without a GPU can have one."""
    cuda_event = 1

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


def send_behind_event(schedulers, name, room, upto):
    """How often the event was waited for in all."""
    it = schedulers[name]
    end = it.rooms[room].end
    event = end._early_send_wait_event = Event()
    send(schedulers, name, room, upto)
    once = event.waited, end._early_send_wait_event
    send(schedulers, name, room, upto + it.model["page_size"])
    return *once, event.waited


def lose_room(schedulers, name, room):
    schedulers[name].manager.request_status.pop(room)
    return room in schedulers[name].manager.request_status


def ask_for_host_memory(schedulers, name, room):
    import numpy as np
    from sglang.srt.disaggregation.base.conn import KVTransferDestination
    try:
        schedulers[name].rooms[room].end.send_metadata(np.zeros(1, dtype=np.int32), 0,
                                                       destination=KVTransferDestination.HOST)
    except NotImplementedError as why:
        return str(why)
    return ""


def verifies(schedulers, name, address):
    return schedulers[name].manager.should_verify_kv_checksum(address)


def send_pages(schedulers, name, room, pages):
    import numpy as np
    it = schedulers[name]
    with it.in_context():
        it.rooms[room].end.send(np.asarray(pages, dtype=np.int32), None)


# -- oracles: SGLang's own arithmetic


def unlike_sglang(_, heads, theirs, own):
    """The places where Troupe's layouts put other heads than SGLang slices."""
    from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params
    found = []
    for rank in range(own):
        here = list(range(rank * heads // own, (rank + 1) * heads // own)) or [rank * heads // own]
        covered = set()
        for source in range(theirs):
            there = list(range(source * heads // theirs, (source + 1) * heads // theirs)) or [source * heads // theirs]
            if theirs > own and source // (theirs // own) != rank or own > theirs and rank // (own // theirs) != source:
                continue
            if theirs == own and source != rank:
                continue
            begin, count, into, _ = compute_head_slice_params(theirs, own, source, rank, heads)
            for number in range(count):
                if there[begin + number] != here[into + number]:
                    found.append((source, rank, begin, into, count))
                covered.add(into + number)
        if covered != set(range(len(here))):
            found.append((rank, "lacks heads", sorted(covered)))
    return found


def unlike_sglangs_states(_, theirs, own):
    """The places where the test's bytes of a recurrent state differ from those that SGLang's slices make."""
    import numpy as np
    from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks

    def slot(rank, ranks, what):
        it = Scheduler.__new__(Scheduler)
        it.model = MODEL
        size = {"conv": 384 // ranks, "heads": 256 // ranks, "same": 24}[what]
        return it.state_bytes({"kind": "mamba", "rank": rank, "ranks": ranks}, 0, what, 1, 0, size)

    found = []
    for what, dim, groups, outer in (("conv", 64, [16, 16, 32], 3), ("heads", 64, None, 1), ("same", 0, None, 1)):
        for rank in range(own):
            whole = np.zeros(len(slot(rank, own, what)), dtype=np.uint8)
            for source in range(theirs):
                ratio = max(theirs, own) // min(theirs, own)
                if (source // ratio if theirs > own else source) != (rank // ratio if own > theirs else rank):
                    continue
                its = slot(source, theirs, what)
                for begin, into, count in compute_mamba_state_slice_byte_blocks(
                        src_item_len=len(its), dst_item_len=len(whole), src_dim=dim // theirs, dst_dim=dim // own,
                        outer_count=outer, src_attn_tp_size=theirs, dst_attn_tp_size=own, dst_tp_rank_in_group=rank,
                        local_tp_rank_in_group=source, conv_shard_groups=groups):
                    whole[into:into + count] = its[begin:begin + count]
            if not (whole == slot(rank, own, what)).all():
                found.append((what, rank))
    return found


def http(_, method, url, body=None):
    """`body`: a text is sent unchanged."""
    import requests
    sent = {"data": body} if isinstance(body, str) else {"json": body} if body is not None else {}
    answer = requests.request(method, url, timeout=PATIENCE, **sent)
    return answer.status_code, answer.text


def unlike_sglangs_server(_, seed):
    """Calls to which the two bootstrap servers respond differently."""
    import random

    import requests
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from troupe.sglang.bootstrap import TroupeKVBootstrapServer

    def served(kind):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = kind("127.0.0.1", port)

        def answers():
            with contextlib.suppress(requests.RequestException):
                return requests.get(f"http://127.0.0.1:{port}/health", timeout=1).text == "OK"
            return False

        until(answers, "a bootstrap server does not answer")
        return server, f"http://127.0.0.1:{port}"

    both = [served(kind) for kind in (CommonKVBootstrapServer, TroupeKVBootstrapServer)]
    numbers = random.Random(seed)
    tp, pp, dp = numbers.choice((1, 2)), numbers.choice((1, 2)), numbers.choice((1, 2))
    ranks = [(d, t, p) for d in range(dp) for t in range(tp) for p in range(pp)]
    numbers.shuffle(ranks)
    calls = []
    for d, t, p in ranks:
        calls += [("GET", "/route", {"prefill_dp_rank": -1, "prefill_cp_rank": -1, "target_tp_rank": -1,
                                     "target_pp_rank": -1}, None),
                  ("GET", "/route", {"prefill_dp_rank": d, "prefill_cp_rank": 0, "target_tp_rank": t,
                                     "target_pp_rank": p}, None),
                  ("PUT", "/route", None, {
                      "attn_tp_size": tp, "attn_tp_rank": t, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": dp,
                      "attn_dp_rank": d, "pp_size": pp, "pp_rank": p, "system_dp_size": 1, "system_dp_rank": 0,
                      "rank_ip": "10.0.0.1", "rank_port": 1000 + t, "page_size": 16, "kv_cache_dtype": "auto",
                      "kv_layout": numbers.choice((None, "a")), "load_balance_method": numbers.choice(("x", "follow_bootstrap_room")),
                      "prefill_http_port": 30000})]
    calls += [call for call in calls if call[0] == "GET"]
    calls += [("GET", "/route", {"prefill_dp_rank": 9, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}, None),
              ("GET", "/route", {"prefill_dp_rank": 0}, None), ("POST", "/route", None, {}), ("GET", "/health", None, None),
              ("POST", "/register_dp_rank", None, {"bootstrap_room": 5, "dp_rank": 1}),
              ("POST", "/query_dp_ranks", None, {"bootstrap_rooms": [5, 6, "5"]}), ("GET", "/nothing", None, None)]
    found = []
    for method, path, query, body in calls:
        answers = [requests.request(method, url + path, params=query, json=body, timeout=PATIENCE) for _, url in both]
        told = [(one.status_code, one.text) for one in answers]
        if told[0] != told[1]:
            found.append((method, path, query, *told))
    for server, _ in both:
        server.close()
    return found
