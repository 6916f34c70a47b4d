"""Chakra traces and InfraGraph: written bytes are read by protobuf with the published field numbers, and come back."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lakh import config
from lakh.errors import DataError, InfeasiblePlan, UserError
from lakh.planner.catalogue import load_model
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.interchange.chakra_export import step_traces
from lakh.planner.interchange.chakra_replay import GROUPS_FILE, TraceSet, read_traces, replay_traces
from lakh.planner.interchange.chakra_trace import COLLECTIVE_TYPES, TraceNode, encode_trace, read_trace
from lakh.planner.interchange.infragraph import cluster_from_infragraph, infragraph_of, read_infragraph
from lakh.planner.interchange.protobuf_wire import fields_of
from lakh.spec.cluster import Cluster, Tier, load_cluster

Lakh = Callable[..., tuple[int, str, str]]
Json = Callable[[str], dict[str, Any]]
MODEL, CLUSTER = load_model("llama3-8b"), load_cluster("llama3-24k-roce")


def plan(**values: float) -> ExecutionPlan:
    return ExecutionPlan.of(**{"gpus": 16, "sequence": 4096, "batch": 32, "zero": 1, **values})


# --- the published schema, as protobuf sees it ---

FIELD = descriptor_pb2.FieldDescriptorProto
# name, number, type; of et_def.proto
ATTRIBUTE = [
    ("name", 1, FIELD.TYPE_STRING), ("double_val", 3, FIELD.TYPE_DOUBLE), ("float_val", 5, FIELD.TYPE_FLOAT),
    ("int32_val", 7, FIELD.TYPE_INT32), ("int64_val", 9, FIELD.TYPE_INT64), ("uint32_val", 11, FIELD.TYPE_UINT32),
    ("uint64_val", 13, FIELD.TYPE_UINT64), ("sint32_val", 15, FIELD.TYPE_SINT32),
    ("sint64_val", 17, FIELD.TYPE_SINT64), ("fixed32_val", 19, FIELD.TYPE_FIXED32),
    ("sfixed64_val", 25, FIELD.TYPE_SFIXED64), ("bool_val", 27, FIELD.TYPE_BOOL),
    ("string_val", 29, FIELD.TYPE_STRING),
]  # fmt: skip
NODE = [
    ("id", 1, FIELD.TYPE_UINT64), ("name", 2, FIELD.TYPE_STRING), ("type", 3, FIELD.TYPE_UINT32),
    ("ctrl_deps", 4, FIELD.TYPE_UINT64), ("data_deps", 5, FIELD.TYPE_UINT64),
    ("start_time_micros", 6, FIELD.TYPE_UINT64), ("duration_micros", 7, FIELD.TYPE_UINT64),
    ("attr", 10, FIELD.TYPE_MESSAGE),
]  # fmt: skip


@pytest.fixture(scope="module")
def chakra_node() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    for message, fields in (("Attribute", ATTRIBUTE), ("Node", NODE)):
        found = file.message_type.add(name=message)
        for name, number, kind in fields:
            repeated = name in ("ctrl_deps", "data_deps", "attr")
            label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
            more = {"type_name": ".et.Attribute"} if name == "attr" else {}
            found.field.add(name=name, number=number, type=kind, label=label, **more)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("et.Node"))


def messages(data: bytes) -> list[bytes]:
    """A trace file is like the packed values of a field: lengths and bytes."""
    found, at = [], 0
    while at < len(data):
        size = shift = 0
        while True:
            byte, at = data[at], at + 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found.append(data[at : at + size])
        at += size
    return found


def test_protobuf_reads_what_is_written(chakra_node: Any) -> None:
    nodes = step_traces(MODEL, plan(tp=2, pp=2, sequence_parallel=1), CLUSTER).nodes(5)
    metadata, *found = messages(encode_trace(nodes))
    assert dict(fields_of(metadata)) == {1: b"0.0.4"}
    assert len(found) == len(nodes)
    for node, data in zip(nodes, found, strict=True):
        read = chakra_node.FromString(data)
        assert (read.id, read.name, read.duration_micros) == (node.id, node.name, node.duration_us)
        assert tuple(read.data_deps) == node.depends_on
        values = {one.name: [value for field, value in one.ListFields() if field.name != "name"] for one in read.attr}
        assert {name: value[0] if value else 0 for name, value in values.items()} == node.attributes
        assert read.SerializeToString() == chakra_node.FromString(read.SerializeToString()).SerializeToString()
    types = {chakra_node.FromString(data).type for data in found}
    assert types == {4, 5, 6, 7}  # COMP, COMM_SEND, COMM_RECV, COMM_COLL


def test_what_protobuf_writes_is_read(chakra_node: Any, tmp_path: Path) -> None:
    node = chakra_node(id=2**40, name="both", type=5, ctrl_deps=[1], data_deps=[2, 300], duration_micros=7)
    values = {
        "double_val": 0.5, "float_val": 0.25, "int32_val": -3, "int64_val": -(2**40), "uint32_val": 3,
        "uint64_val": 2**63, "sint32_val": -5, "sint64_val": 2**40, "fixed32_val": 9, "sfixed64_val": -9,
        "bool_val": True, "string_val": "group",
    }  # fmt: skip
    for name, value in values.items():
        node.attr.add(name=name, **{name: value})
    data = node.SerializeToString()
    path = tmp_path / "job.0.et"
    path.write_bytes(gzip.compress(b"\x00" + bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data))
    (read,) = read_trace(path)
    assert (read.id, read.name, read.type, read.duration_us) == (2**40, "both", "send", 7)
    assert read.depends_on == (1, 2, 300)
    assert read.attributes == values


@pytest.mark.parametrize("data", [b"", b"\x05ab", b"\x00\x02\xff\xff", b"\x00\x02\x1f\x01", b"\x1f\x8bnot gzip"])
def test_damaged_traces_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.0.et"
    path.write_bytes(data)
    with pytest.raises(DataError, match="no Chakra trace"):
        read_trace(path)


# --- replay ---


def replayed(change: ExecutionPlan, cluster: Cluster = CLUSTER) -> Any:
    traces = step_traces(MODEL, change, cluster)
    return replay_traces(TraceSet([traces.nodes(rank) for rank in range(traces.ranks)], traces.groups), cluster)


@pytest.mark.parametrize(
    "change",
    [
        {"pp": 4}, {"pp": 4, "chunks": 2}, {"pp": 4, "zero_bubble": 1}, {"pp": 2, "gpipe": 1}, {"cp": 2, "pp": 2},
        {"pp": 4, "pp_inside": 1}, {"zero": 0},
    ],
)  # fmt: skip
def test_a_replayed_step_takes_the_planned_time(change: dict[str, float]) -> None:
    from lakh.planner.step_simulation import simulate_step

    one = plan(overlap=0, **change)  # in the traces gradients follow the last backward pass
    planned = simulate_step(MODEL, one, CLUSTER, routing="spray").simulated
    found = replayed(one)
    assert found.seconds == pytest.approx(float(planned.total_s), rel=0.05)
    assert found.compute_s < found.seconds


def test_a_pipeline_waits_for_its_first_stage() -> None:
    def compute(number: int, *after: int) -> TraceNode:
        return TraceNode(number, "work", "compute", after, 1000)

    send = TraceNode(1, "send", "send", (0,), attributes={"comm_dst": 1, "comm_tag": 3, "comm_size": 450_000_000})
    receive = TraceNode(0, "receive", "receive", attributes={"comm_src": 0, "comm_tag": 3, "comm_size": 450_000_000})
    found = replay_traces(TraceSet([[compute(0), send], [receive, compute(1, 0)]], {}), CLUSTER)
    assert found.slowest_rank == 1
    assert found.seconds > 0.002 + 0.001  # both work, and at least a millisecond on NVLink
    assert found.compute_s == pytest.approx(0.001)
    alone = replay_traces(TraceSet([[compute(0)], [compute(0)]], {}), CLUSTER)
    assert alone.seconds == pytest.approx(0.001)


def test_collectives_of_other_programs_span_all_ranks() -> None:
    def all_reduce(size: int) -> TraceNode:
        return TraceNode(0, "reduce", "collective", attributes={"comm_type": 0, "comm_size": size})

    small, large = (
        replay_traces(TraceSet([[all_reduce(size)] for _ in range(32)], {}), CLUSTER) for size in (1 << 20, 1 << 30)
    )
    assert 0 < small.seconds < large.seconds
    assert large.bytes_sent == {"all_reduce": 32 << 30}
    slow = replace(CLUSTER, tiers=tuple(replace(t, bandwidth_GBps=t.bandwidth_GBps / 10) for t in CLUSTER.tiers))
    again = replay_traces(TraceSet([[all_reduce(1 << 30)] for _ in range(32)], {}), slow)
    assert again.seconds > 5 * large.seconds


def test_unfinished_jobs_are_refused(tmp_path: Path) -> None:
    receive = TraceNode(0, "receive", "receive", attributes={"comm_src": 1, "comm_tag": 3})
    with pytest.raises(DataError, match="never start"):
        replay_traces(TraceSet([[receive], []], {}), CLUSTER)
    cycle = [TraceNode(0, "a", "compute", (1,)), TraceNode(1, "b", "compute", (0,))]
    with pytest.raises(DataError, match="2 of 2 nodes never start"):
        replay_traces(TraceSet([cycle], {}), CLUSTER)
    recorded = replay_traces(TraceSet([[TraceNode(0, "a", "compute", (7,), 1000)]], {}), CLUSTER)
    assert (recorded.absent_dependencies, recorded.seconds) == (1, pytest.approx(0.001))
    stranger = TraceNode(0, "a", "collective", attributes={"comm_type": 0, "pg_name": "9"})
    with pytest.raises(DataError, match="process group '9'"):
        replay_traces(TraceSet([[stranger]], {}), CLUSTER)
    with pytest.raises(UserError, match=r"NAME\.0\.et"):
        read_traces(tmp_path)
    (tmp_path / "job.1.et").write_bytes(encode_trace([receive]))
    with pytest.raises(UserError, match=r"ranks \[1\]"):
        read_traces(tmp_path)
    (tmp_path / "job.0.et").write_bytes(encode_trace([receive]))
    (tmp_path / GROUPS_FILE).write_text('{"0": [0, 5]}')
    with pytest.raises(DataError, match=r"without a trace \(\[5\]\)"):
        read_traces(tmp_path)


def test_plans_that_traces_cannot_represent_are_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="shard 8"):
        step_traces(MODEL, plan(shard=8, zero=0), CLUSTER)
    with pytest.raises(UserError, match="too many"):
        step_traces(MODEL, plan(gpus=16384, pp=4, batch=2**20), CLUSTER)


def test_experts_exchange_and_reduce_in_their_own_groups() -> None:
    model = load_model("qwen3-30b-a3b")
    traces = step_traces(model, plan(ep=8, batch=16), CLUSTER)
    nodes = traces.nodes(3)
    kinds = {(node.collective, len(traces.groups[str(node.attributes["pg_name"])])) for node in nodes if
             node.type == "collective"}  # fmt: skip
    assert ("all_to_all", 8) in kinds
    assert ("reduce_scatter", 16) in kinds
    assert ("reduce_scatter", 2) in kinds  # two ranks hold the same experts
    for ranks in traces.groups.values():
        assert len(set(ranks)) == len(ranks)


def test_the_commands_write_and_read_traces(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    words = ["--model", "llama3-8b", "--cluster", "llama3-24k-roce", "--gpus", "16", "--pp", "2", "--zero", "1",
             "--batch", "32", "--sequence", "4096", "--out", str(folder)]  # fmt: skip
    code, out, _ = lakh("plan", "chakra", "export", *words, "--json")
    assert code == 0
    written = last_line(out)
    assert len(list(folder.glob("step.*.et"))) == written["ranks"] == 16
    code, out, _ = lakh("plan", "chakra", "import", str(folder), "--cluster", "llama3-24k-roce", "--json")
    assert code == 0
    read = last_line(out)
    assert sum(read["nodes"].values()) == written["nodes"]
    assert read["simulated"]
    assert "all_gather" in read["bytes_sent"]
    code, out, _ = lakh("plan", "chakra", "import", str(folder), "--cluster", "8xh100")
    assert code == 2


# --- InfraGraph ---


def small(*, rails: bool) -> Cluster:
    node, rack = CLUSTER.tiers[:2]
    tiers = (
        node,
        replace(rack, size=64, rails=rails) if rails else rack,
        Tier(name="zone", size=256, bandwidth_GBps=50.0, latency_us=10.0, oversubscription=2.0),
        Tier(name="cluster", size=512, bandwidth_GBps=50.0, latency_us=22.0, oversubscription=4.0),
    )
    return replace(CLUSTER, name="small", tiers=tiers)


@pytest.mark.parametrize("cluster", [small(rails=False), small(rails=True)], ids=["plain", "rails"])
def test_a_cluster_comes_back_from_its_infragraph(cluster: Cluster) -> None:
    back = cluster_from_infragraph(json.loads(json.dumps(infragraph_of(cluster))), cluster.gpu)
    assert [tier.size for tier in back.tiers] == [tier.size for tier in cluster.tiers]
    for tier, was in zip(back.tiers, cluster.tiers, strict=True):
        assert tier.bandwidth_GBps == pytest.approx(was.bandwidth_GBps)
        assert tier.latency_us == pytest.approx(was.latency_us)
        assert tier.oversubscription == pytest.approx(was.oversubscription)
        assert tier.rails == was.rails


def test_every_port_of_the_infragraph_has_one_cable() -> None:
    graph = infragraph_of(small(rails=True))
    counts = {one["name"]: one["count"] for one in graph["instances"]}
    ports = {
        one["name"]: {part["name"]: part["count"] for part in one["components"]} for one in graph["devices"]
    }  # fmt: skip

    def ends(end: dict[str, str]) -> list[tuple[str, int, int]]:
        name, _, numbers = end["instance"].rstrip("]").partition("[")
        part, _, parts = end["component"].rstrip("]").partition("[")
        first, last = map(int, numbers.split(":"))
        low, high = map(int, parts.split(":"))
        assert last <= counts[name]
        assert high <= ports[name][part]
        return [(name, i, k) for i in range(first, last) for k in range(low, high)]

    seen: list[tuple[str, int, int]] = []
    for edge in graph["edges"]:
        both = [ends(edge[name]) for name in ("ep1", "ep2")]
        assert len(both[0]) == len(both[1])
        seen += both[0] + both[1]
    assert len(set(seen)) == len(seen)
    assert len(seen) == sum(count * (ports[name].get("port") or ports[name]["nic"]) for name, count in counts.items())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda graph: graph.pop("edges"), "no InfraGraph"),
        (lambda graph: graph["devices"][0]["components"].pop(0), "0 kinds of servers"),
        (lambda graph: graph["links"][0].pop("physical"), "no rate"),
        (lambda graph: graph["edges"][0].update(scheme="ring"), "scheme ring"),
        (lambda graph: graph["edges"].pop(0), "groups of"),
        (lambda graph: graph["edges"][0].update(link="gone"), "no InfraGraph"),
    ],
)
def test_wrong_infragraphs_are_refused(change: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path) -> None:
    graph = infragraph_of(small(rails=False))
    change(graph)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph))
    with pytest.raises(DataError, match=told):
        cluster_from_infragraph(read_infragraph(path), CLUSTER.gpu, str(path))


def test_the_commands_convert_a_network(lakh: Lakh, last_line: Json, tmp_path: Path) -> None:
    import yaml

    graph, cluster, given = (tmp_path / name for name in ("graph.json", "cluster.toml", "given.toml"))
    given.write_text(config.to_toml(small(rails=True)))
    code, out, _ = lakh("plan", "infragraph", "export", "--cluster", str(given), "--out", str(graph), "--json")
    assert code == 0
    assert last_line(out)["instances"]["server"] == 64
    text = tmp_path / "graph.yaml"
    text.write_text(yaml.safe_dump({"infrastructure": json.loads(graph.read_text())}))
    for file in (graph, text):
        words = ["plan", "infragraph", "import", str(file), "--gpu-of", "h100-pod", "--out", str(cluster), "--json"]
        code, out, _ = lakh(*words)
        assert code == 0
        assert [tier.size for tier in load_cluster(cluster).tiers] == [8, 64, 256, 512]


def test_collective_numbers_are_those_of_the_schema() -> None:
    assert COLLECTIVE_TYPES.index("all_to_all") == 6
    assert COLLECTIVE_TYPES.index("reduce_scatter") == 7
