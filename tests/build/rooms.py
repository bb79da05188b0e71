#!/usr/bin/env python3
"""The rooms of actors/, and who may include whom. Every header and source belongs to one room. A room includes rooms of
lower floors only, so that there is no cycle; what must work without CAF reaches no header of CAF.

    rooms.py           fails with a line for each include that goes up or reaches CAF, and for each file of no room
    rooms.py --graph   prints the rooms with what each includes, and how often
"""

import argparse
import collections
import pathlib
import re
import sys

ACTORS = pathlib.Path(__file__).resolve().parents[2] / "actors"

# From the ground up: floor, room, whether its files may reach CAF, and those.
ROOMS = [
    (0, "base", False, "clock broadcast_budget logging message_fields phrases restart_intensity thread_cores"),
    (1, "door", False, """
        certificate_files certificates door door_credentials door_dial door_eviction door_files door_greeting door_guests
        door_handshake door_loop door_openssl door_pump door_resolver door_security door_sockets door_thread door_tls
        door_tls_context door_user_secret"""),
    (2, "discovery", False, "supervisor_begin supervisor_notice supervisor_process supervisor_search"),
    (3, "messages", True, """
        cache_slice cluster_messages engine_types keep_alive local_messages member_list messages movement node_info
        node_roles placement report session_messages source_changes types"""),
    (4, "transfer", False, "receive_session send_session session_actions"),
    (4, "membership", False, """
        affinity_table drains event_log membership membership_drain membership_open membership_record
        membership_restore membership_store placement_epochs router slot_claims stage_router"""),
    (5, "operations", False, """
        cache_leases cache_pool compute_line event_queue lent_memory member_watch node_drain operation_outcome
        operation_table request_tables source waiting_events"""),
    (6, "runtime", True, """
        actor_host_options ask_link crash file_size_signal caf_thread_scope host_options inline_executor local_address network
        network_dialler network_stream room_to_start scheduler system"""),
    (7, "node", True, """
        backend_reports decode_receiver deployment_place engine_checks engine_port engine_port_leases engine_port_parts
        engine_port_receives engine_port_sessions engine_port_sources engine_port_values engine_port_words link link_dial
        link_end link_handshake link_parts link_pulse link_rebuild link_room link_sessions link_transport link_watch node
        node_context node_crashes node_end node_failure node_links node_parts node_place node_registration node_report
        node_requests pool_manager prefill_sender session_shell source_word value_client value_regions value_server
        value_store"""),
    (7, "supervisor", True, """
        supervisor supervisor_drains supervisor_nodes supervisor_options supervisor_parts supervisor_placements"""),
    (7, "client", True, "carried_calls cluster_client request_blame request_carrier request_watch slot_claim"),
    (8, "engine", True, "cache_setup engine engine_edge engine_setup"),
]

FLOOR = {room: floor for floor, room, _, _ in ROOMS}
WITHOUT_CAF = {room for _, room, caf, _ in ROOMS if not caf}
ROOM_OF = {name: room for _, room, _, files in ROOMS for name in files.split()}
INCLUDE = re.compile(r'^\s*#\s*include\s+"troupe/actors/(\w+)\.hpp"', re.MULTILINE)


def way_to_caf(file, texts, seen):
    """The headers from one to the next, up to one that includes CAF's; none: empty."""
    if "#include <caf/" in texts[file]:
        return [file]
    for name in INCLUDE.findall(texts[file]):
        header = f"{name}.hpp"
        if header in texts and header not in seen:
            seen.add(header)
            if way := way_to_caf(header, texts, seen):
                return [file, *way]
    return []


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", action="store_true")
    options.add_argument("--actors", type=pathlib.Path, default=ACTORS, help="the folder, for the test of this")
    asked = options.parse_args()
    wrong = []
    arrows = collections.Counter()
    files = sorted([*asked.actors.glob("*.hpp"), *asked.actors.glob("*.cpp")])
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    for file in files:
        room = ROOM_OF.get(file.stem)
        if room is None:
            wrong.append(f"{file.name} is of no room: name it in {pathlib.Path(__file__).name}")
            continue
        for name in INCLUDE.findall(texts[file.name]):
            to = ROOM_OF.get(name)
            if to is None or to == room:
                continue
            arrows[room, to] += 1
            if FLOOR[to] >= FLOOR[room]:
                wrong.append(f"{file.name} ({room}) includes {name}.hpp ({to}), which is not below it")
        if room in WITHOUT_CAF and (way := way_to_caf(file.name, texts, set())):
            wrong.append(f"{file.name} ({room}) reaches CAF: {' -> '.join(way)}")
    there = {file.stem for file in files}
    wrong += [f"{name} is named, and is not there" for name in sorted(ROOM_OF) if name not in there]
    if asked.graph:
        for floor, room, _, _ in reversed(ROOMS):
            count = sum(1 for file in files if ROOM_OF.get(file.stem) == room)
            below = ", ".join(f"{to} ({n})" for (of, to), n in sorted(arrows.items()) if of == room)
            print(f"{floor} {room:<11} {count:>3} files -> {below or '-'}")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


sys.exit(main())
