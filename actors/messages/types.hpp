#pragma once

/// Every type that CAF has to know: message type ids, atoms, and the only place that looks at CAF's
/// version.

#include <cstdint>
#include <string>
#include <vector>

#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/config.hpp>
#include <caf/fwd.hpp>
#include <caf/meta/type_name.hpp>
#include <caf/type_id.hpp>

#if CAF_VERSION < 1700 || CAF_VERSION >= 1800
#error "Troupe speaks the dialect of CAF 0.17; porting starts in this file"
#endif

#include "troupe/actors/cluster_messages.hpp"

CAF_BEGIN_TYPE_ID_BLOCK(troupe, first_custom_type_id)

CAF_ADD_TYPE_ID(troupe, (troupe::actors::node_info))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::registration_request))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::registration))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::load_report))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::heartbeat))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::heartbeat_ack))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::member))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::membership))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::placement_request))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::placement))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::link_request))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::link_reply))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::link_notice))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::backend_report))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::link_report))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::transfer_report))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::pool_report))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::node_report))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::call_request))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::call_reply))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::drain_request))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::drain_reply))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::drain_order))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::name_request))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::name_lease))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::cluster_event))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::event_query))
CAF_ADD_TYPE_ID(troupe, (troupe::actors::event_page))

CAF_ADD_ATOM(troupe, troupe::actors, register_atom, "register")
CAF_ADD_ATOM(troupe, troupe::actors, register_again_atom, "rejoin")
CAF_ADD_ATOM(troupe, troupe::actors, leave_atom, "leave")
CAF_ADD_ATOM(troupe, troupe::actors, place_atom, "place")
CAF_ADD_ATOM(troupe, troupe::actors, placed_request_ended_atom, "placed")
CAF_ADD_ATOM(troupe, troupe::actors, members_atom, "members")
CAF_ADD_ATOM(troupe, troupe::actors, report_atom, "report")
CAF_ADD_ATOM(troupe, troupe::actors, drain_atom, "drain")
CAF_ADD_ATOM(troupe, troupe::actors, lease_name_atom, "claim")
CAF_ADD_ATOM(troupe, troupe::actors, events_atom, "events")
CAF_ADD_ATOM(troupe, troupe::actors, tick_atom, "tick")

CAF_END_TYPE_ID_BLOCK(troupe)
