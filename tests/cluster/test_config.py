import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cedar.cluster.config import ClusterConfig, StageName
from cedar.cluster.config_load import load_config, load_model_preset, parse_config, preset_source, presets
from cedar.cluster.config_print import effective_yaml, json_schema, knobs, knobs_markdown
from cedar.cluster.errors import ConfigError
from cedar.cluster.model_check import check_model

MINIMAL = {"model": {"path": "/m"}}


@pytest.mark.parametrize("name", presets("clusters"))
def test_cluster_presets_validate(name: str) -> None:
    config = load_config(name)
    assert config.model.preset is None or config.model.preset in presets("models")
    assert check_model(config) is None or config.model.path.startswith("/models/")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["gateway.prot=1"], "gateway.prot: unknown key; did you mean 'port'?"),
        (["modle.path=x"], "modle: unknown key; did you mean 'model'?"),
        (["prefill.autoscaling.targt=2"], "prefill.autoscaling.targt: unknown key; did you mean 'target'?"),
        (["decode.zzz=1"], "decode.zzz: unknown key; known: autoscaling, host"),
        (["gateway.port=99999"], "gateway.port: 99999: "),
        (["decode.autoscaling.max=1"], "decode.autoscaling.max: 1 is below min: 2"),
        (["decode.autoscaling.signal=cpu"], "decode.autoscaling.signal: 'cpu': "),
        (["decode.autoscaling.target=1.5"], "decode.autoscaling.target: 1.5 is over 1, and signal 'slots'"),
        (["directory.expire_after_s=0.1"], "directory.expire_after_s: 0.1 is below two heartbeats"),
        (["ray.address=local"], 'ray.address: "local" is what an unset address means'),
        (["gateway"], "override 'gateway': write it as section.field=value"),
        (["gateway.port.x=1", "gateway.port=1"], None),
    ],
)
def test_a_mistake_is_named_with_its_field(overrides: list[str], said: str | None) -> None:
    if said is None:
        load_config("local-cpu", overrides)  # the last override of a field counts
        return
    with pytest.raises(ConfigError) as caught:
        load_config("local-cpu", overrides)
    assert said in str(caught.value)


def test_unknown_preset_and_missing_file() -> None:
    with pytest.raises(ConfigError, match="did you mean 'local-cpu'"):
        load_config("local-cpus")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file; presets: local-cpu"):
        load_config("nowhere.yaml")


def test_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: required, and not given"):
        parse_config({"model": {}})


def test_a_value_in_place_of_a_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="gateway is a value, not a section"):
        load_config("local-cpu", ["gateway=1", "gateway.port=2"])


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "-1"])
def test_every_number_is_finite_and_in_its_range(value: str) -> None:
    numbers = [knob.path for knob in knobs() if knob.type.startswith(("int", "float"))]
    assert len(numbers) > 60
    for path in numbers:
        with pytest.raises(ConfigError, match=path.split(".")[-1]):
            load_config("local-cpu", [f"{path}={value}"])


def test_an_override_that_is_no_yaml_is_told() -> None:
    with pytest.raises(ConfigError, match=r"override 'gateway\.port=\[': line 1: not YAML: while"):
        load_config("local-cpu", ["gateway.port=["])


def test_relative_paths_are_taken_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {path: weights}\nstore: {directory: ./store}\n")
    config = load_config(file)
    assert config.model.path == str(tmp_path / "weights")
    assert config.store.directory == str(tmp_path / "store")


def test_urls_are_not_paths(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {path: 's3://bucket/weights'}\n")
    assert load_config(file).model.path == "s3://bucket/weights"


def test_files_that_are_not_a_mapping_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for content, said in (
        (b"[1, 2]", ": a mapping of names to values is needed, not list"),
        (b"", ": empty file; a mapping of names"),
        (b"# nothing\n---\n", ": empty file; a mapping of names"),
        (b"model:\n  path: [x\ngateway: 1\n", ": line 3: not YAML: while parsing a flow sequence"),
        (b"model: {}\n\tx: 1\n", ": line 2: not YAML: "),
        (b"model: {}\n\x00\n", ": line 2: not YAML: "),
        (b"\xff\xfe\xff", ": not YAML: byte 0 is not UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert str(caught.value).startswith(f"{file}{said}")
        assert "unicode string" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_everything_listens_on_loopback_unless_told_otherwise() -> None:
    config = parse_config(MINIMAL)
    stages: tuple[StageName, ...] = ("encoder", "prefill", "decode")
    hosts = [config.gateway.host, config.store.host, *(config.stage(name).host for name in stages)]
    assert set(hosts) == {"127.0.0.1"}


def test_configuration_is_frozen() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.gateway.port = 1  # type: ignore[misc]


def test_effective_configuration_reads_back() -> None:
    config = load_config("local-cpu")
    assert ClusterConfig.model_validate(yaml.safe_load(effective_yaml(config))) == config


def test_every_knob_is_described_and_printed() -> None:
    table = knobs_markdown()
    for knob in knobs():
        assert knob.description, knob.path
        assert f"`{knob.path}`" in table
        for word in ("FieldInfo", "Optional", "Annotated"):
            assert word not in knob.type, knob
    assert json_schema()["additionalProperties"] is False


def test_importing_the_configuration_is_cheap() -> None:
    heavy = "{'ray', 'torch', 'grpc', 'numpy'}"
    code = f"import sys, cedar.cluster.config_load; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_flash_preset_is_the_specs_table() -> None:
    flash = load_model_preset("flash")["text_config"]
    assert isinstance(flash, dict)
    assert flash["compress_ratios"] == [0, 0] + 18 * [2] + 20 * [1] + 3 * [0]
    sources = [flash["compress_ratios"][layer] for layer in flash["kv_source_layer_ids"]]
    entry_bytes = flash["head_dim"] // 2 + flash["head_dim"] // 16
    key_bytes = flash["index_head_dim"] // 2 + flash["index_head_dim"] // 32
    assert sum((entry_bytes + key_bytes) / ratio for ratio in sources) == 890


def test_tiny_preset_is_the_golden_checkpoint() -> None:
    golden = Path(__file__).parents[1] / "golden" / "v41-tiny" / "config.json"
    assert json.loads(golden.read_text()) == load_model_preset("tiny")


def test_model_presets_have_the_same_keys() -> None:
    def keys(value: object) -> object:
        return {name: keys(inner) for name, inner in value.items()} if isinstance(value, dict) else None

    assert keys(load_model_preset("flash")) == keys(load_model_preset("tiny"))


def test_ray_up_accepts_the_launcher_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = preset_source("ray", "cluster-launcher").read_text("utf-8")
    config = prepare_config(yaml.safe_load(text))
    validate_config(config)
    assert config["provider"]["type"] == "local"
    assert config["available_node_types"]["local.cluster.node"]["max_workers"] == 3
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert sum("ray start" in command for command in starts) == 2
    assert all("RAY_AUTH_MODE=disabled" in command for command in starts if "ray start" in command)
