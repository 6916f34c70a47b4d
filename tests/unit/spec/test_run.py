"""Runs: from recipes and files, changed with `--set`, with all checks."""

import re
from pathlib import Path

import pytest

from lakh import config
from lakh.errors import ConfigError, InfeasiblePlan, UserError
from lakh.spec import Data, Fault, Mesh, Run, load_run
from lakh.spec.cluster import load_cluster

RECIPES = [
    f"{path}:{name}"
    for path in sorted(Path("recipes").glob("*.py"))
    for name in re.findall(r"^def ([a-z]\w*)", path.read_text(), re.M)
]
CLUSTERS = sorted(Path("clusters").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_run_of_every_recipe_round_trips_through_toml(recipe: str, tmp_path: Path) -> None:
    run = load_run(recipe)
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml(run))
    assert load_run(file) == run
    assert load_run(tmp_path) == run  # the folder of a run is as good as its file
    run.accumulation(run.mesh.ranks)


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda path: path.stem)
def test_every_cluster_file_loads_and_every_number_has_a_source(file: Path) -> None:
    cluster = load_cluster(file)
    assert cluster == load_cluster(file.stem)
    assert cluster.gpu.source
    assert all(tier.source for tier in cluster.tiers)
    assert cluster.tier_of(1) == cluster.tiers[0]
    with pytest.raises(UserError, match="request fewer"):
        cluster.tier_of(cluster.gpus + 1)


def test_the_big_recipes_fill_their_clusters() -> None:
    lakh = load_run("recipes/cluster.py:code_70b_100k")
    assert lakh.mesh.ranks == 98_304
    assert lakh.memory_bytes(98_304)["states"] == pytest.approx(2.2e9, rel=0.02)  # of one copy on 512 GPUs
    run = load_run("recipes/cluster.py:code_70b_24k")
    assert run.mesh.ranks == run.cluster.gpus == 24_576
    assert run.tokens == pytest.approx(1.4e12, rel=0.01)


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (4, 1), (3, 1), (5, 2), (7, 2), (2, 4)])
def test_the_shares_of_a_step_cover_it_once_and_replicas_differ_by_one_micro_batch(replicas: int, shards: int) -> None:
    data, mesh = Data(batch=32, micro_batch=2), Mesh(dp_replicate=replicas, dp_shard=shards)
    shares = [data.share_of(mesh, rank) for rank in range(mesh.data_ranks)]
    assert [row for first, rows in shares for row in range(first, first + rows)] == list(range(32))
    counts = [rows for _, rows in shares]
    assert max(counts) - min(counts) in (0, 2)
    for replica in range(replicas):
        assert len(set(counts[replica * shards : (replica + 1) * shards])) == 1
    run = Run(name="r", data=data, mesh=mesh)
    assert run.accumulation(mesh.ranks, uneven=True) == max(counts) // 2


def test_an_uneven_step_needs_a_micro_batch_for_each_replica_and_no_pipeline() -> None:
    with pytest.raises(InfeasiblePlan):
        Run(name="r", data=Data(batch=4, micro_batch=2), mesh=Mesh(dp_replicate=3)).accumulation(3, uneven=True)
    with pytest.raises(InfeasiblePlan):
        Run(name="r", data=Data(batch=8, micro_batch=2), mesh=Mesh(dp_replicate=3, pp=2)).accumulation(6, uneven=True)


def test_accumulation_follows_the_ranks() -> None:
    run = Run(name="x")
    assert [run.accumulation(world) for world in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(InfeasiblePlan, match="choose a multiple of 24"):
        run.accumulation(3)


def test_sharding_divides_states_and_leaves_activations() -> None:
    run = Run(name="x")
    one, four = run.memory_bytes(1), run.memory_bytes(4)
    assert four["states"] == -(-one["states"] // 4)
    assert four["activations"] == one["activations"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.sequence=9999", "data.sequence (from --set): 9999 is longer than model.context"),
        ("data.micro_batch=5", "does not divide data.batch"),
        ("optim.warmup_steps=100000", "more than train.steps"),
        ("mesh.tp=3", "mesh.tp (from --set): 3 does not divide model.kv_heads"),
        ("trian.steps=3", "did you mean train?"),
        ("name=a/b", "without slashes"),
        ("cluster.gpu.source= ", "say where the numbers come from"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(setting: str, words: str) -> None:
    with pytest.raises((ConfigError, InfeasiblePlan)) as caught:
        load_run("laptop", [setting])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def a(): return 3", "returned int"),
        ("def a(): return 1 / 0", "line 1: ZeroDivisionError"),
        ("def a(:", "SyntaxError"),
        ("x = 1", "holds 0 recipes"),
        ("def a(): ...\ndef b(): ...", "name one:"),
        ("from lakh.spec import Model\ndef a(): return Model(layers=0)", "layers (recipe.py): 0 is not positive"),
    ],
)
def test_a_broken_recipe_is_the_users_input(code: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(code)
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert words in str(caught.value)


def test_one_of_several_recipes_is_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text("from lakh.spec import Run\ndef a(): return Run(name='a')\ndef b(): return Run(name='b')\n")
    assert load_run(f"{path}:b").name == "b"
    with pytest.raises(UserError, match="choose one of: a, b"):
        load_run(f"{path}:c")


def test_files_that_are_neither_recipe_nor_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no run\.toml"):
        load_run(tmp_path)
    with pytest.raises(UserError, match=r"did you mean laptop\?"):
        load_run("labtop")
    with pytest.raises(UserError, match=r"one of: cluster, .*laptop, node"):
        load_run("zzz")


@pytest.mark.parametrize(
    "setting",
    [
        "optim.weight_decay=nan",
        "optim.eps=nan",
        "optim.clip_norm=inf",
        "train.z_loss=nan",
        "train.spike_factor=inf",
        "train.peer_timeout_s=inf",
        "train.peer_timeout_s=1e300",
        "train.threads=100000",
        "data.prefetch=1000000000000",
        "data.skip=[[0, 100000000000000000000]]",
        "model.norm_eps=nan",
        "model.rope_base=inf",
    ],
)
def test_values_out_of_range_are_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_run("laptop", [setting])
    assert refused.value.where.partition(".")[0] == setting.partition(".")[0]


def test_faults_are_parsed_and_printed() -> None:
    assert Fault.parse("kill(rank=3, step=12)") == Fault("kill", rank=3, step=12)
    assert str(Fault.parse(" stop( step=1 , rank=0 ) ")) == "stop(rank=0, step=1)"


@pytest.mark.parametrize(
    "text", ["kill", "kill(3, 12)", "burn(rank=1, step=2)", "kill(rank=-1, step=2)", "kill(rank=1", ""]
)
def test_a_misspelt_fault_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UserError, match=r"kill\(rank=1, step=12\)"):
        Fault.parse(text)


def test_a_mesh_prints_its_axes() -> None:
    assert str(Mesh(dp_shard=4, tp=8)) == "dp_shard=4 x tp=8"
