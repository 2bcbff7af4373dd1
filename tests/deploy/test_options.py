"""The command line, the environment and the environment file, and the commands that they come to."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy import fakes
from tests.deploy.script import ROOT, SCRIPT, Done, free_ports, machine, run, words

pytestmark = pytest.mark.quiet  # one deploy-triton.sh keeps out another

COMMANDS = ("start", "replace", "status", "logs", "stop")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A machine with an engine that runs nothing, without a GPU."""
    return machine(tmp_path, docker=fakes.docker())


def dry_run(env: dict[str, str], *arguments: str) -> Done:
    done = run("start", "--dry-run", *words(free_ports()), *arguments, env=env)
    assert done.code == 0, done.err
    return done


def values(command: list[str], option: str) -> list[str]:
    """Every value of an option in a command."""
    return [after for word, after in itertools.pairwise(command) if word == option]


# -- Help and refusals -------------------------------------------------------------------------------------------------


def test_help_says_the_commands_and_exit_codes() -> None:
    done = run("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", done.out, re.MULTILINE)
    assert "Exit codes: 0" in done.out
    assert run().code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert "--name NAME" in done.out
    assert done.err == ""


def test_the_documented_table_has_every_option_with_its_default() -> None:
    document = (ROOT / "docs" / "deploy.md").read_text()
    documented = dict(re.findall(r"^\| `--([a-z-]+)[^|]*\|[^|]*\| ([^|]*?) ?\|$", document, re.MULTILINE))
    helped: dict[str, str] = {}
    for command in COMMANDS:
        for name, rest in re.findall(r"^  --([a-z-]+)((?:.*\n {30}.*|.*))$", run(command, "--help").out, re.MULTILINE):
            default = re.search(r"\(default: (.*)\)$", rest)
            helped[name] = default[1] if default else ""
    assert {name: default.replace("`", "") for name, default in documented.items()} == helped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["begin"], "there is no command 'begin'"),
        (["start", "--nonsense"], "start has no option --nonsense"),
        (["status", "--gpus", "all"], "status has no option --gpus"),
        (["start", "photo.jpg"], "unexpected argument 'photo.jpg'"),
        (["start", "--image"], "--image needs a value: REF"),
        (["start", "--dry-run=yes"], "--dry-run takes no value"),
        (["stop", "--", "x"], "stop takes no arguments after --"),
        (["start", "--name", ""], "--name must be 1 to 40 characters"),
        (["start", "--name", "a\nb"], "several lines"),
        (["start", "--image", "-it"], "--image '-it' is not an image reference"),
        (["start", "--image", "x;reboot"], "is not an image reference"),
        (["start", "--http-port", "0"], "--http-port '0' is not a number from 1 to 65535"),
        (["start", "--grpc-port", "70000"], "is above 65535"),
        (["start", "--grpc-port", "8000"], "two endpoints would use port 8000"),
        (["start", "--grpc-port", "8010"], "two endpoints would use port 8010"),
        (["start", "--metrics-port", "65530"], "the metrics port plus --port-step, is above 65535"),
        (["start", "--bind", "localhost"], "--bind 'localhost' is no IP address"),
        (["start", "--bind", "1.2.3.400"], "--bind '1.2.3.400' is no IP address"),
        (["start", "--shm-size", "much"], "--shm-size 'much' is not a size"),
        (["start", "--timeout", "soon"], "--timeout 'soon' is not a whole number"),
        (["start", "--timeout", "0"], "--timeout must be above 0"),
        (["start", "--gpus", "0 1"], "--gpus '0 1': say all, none, or"),
        (["start", "--repository", "/nowhere"], "--repository: there is no directory '/nowhere'"),
        (["start", "--repository", "/proc/self/fd"], "holds no model directory"),
        (["start", "--artifacts", "/nowhere"], "--artifacts: there is no directory '/nowhere'"),
        (["start", "--artifacts", "two words"], "is not a volume's name"),
        (["start", "--container-env-file", "/nowhere"], "--container-env-file: there is no readable file"),
        (["start", "--env-file", "/nowhere"], "there is no readable environment file '/nowhere'"),
        (["start", "--user", "a b"], "--user 'a b' is no UID"),
        (["start", "--config-name", "../x"], "--config-name '../x' is not a name"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str, env: dict[str, str]) -> None:
    done = run(*arguments, env=env)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.out == ""


# -- The command that comes of it --------------------------------------------------------------------------------------


def test_the_defaults_are_safe(env: dict[str, str]) -> None:
    command = dry_run(env).command("docker", "run")
    for words_in_a_row in (
        ["--read-only"],
        ["--cap-drop", "ALL"],
        ["--security-opt", "no-new-privileges"],
        ["--restart", "no"],
        ["--tmpfs", "/tmp:rw,nosuid,nodev,noexec,size=1g,mode=1777"],
        ["--log-opt", "max-size=10m"],
    ):
        assert any(command[at : at + len(words_in_a_row)] == words_in_a_row for at in range(len(command)))
    assert [port.split(":")[0] for port in values(command, "--publish")] == ["127.0.0.1"] * 3
    assert [port.split(":")[2] for port in values(command, "--publish")] == ["8000", "8001", "8002"]
    assert "--privileged" not in command
    assert "--gpus" not in command
    assert values(command, "--mount") == ["type=volume,source=triton-vision-artifacts,target=/artifacts"]
    assert command[-3:] == ["triton-vision:latest", "--artifacts", "/artifacts"]


def test_every_option_arrives(env: dict[str, str], tmp_path: Path) -> None:
    repository, artifacts = tmp_path / "my models, new", tmp_path / "made here"
    (repository / "net").mkdir(parents=True)
    (repository / "net" / "config.pbtxt").touch()
    artifacts.mkdir()
    variables = tmp_path / "for the container.env"
    variables.write_text("LOG=1\n")
    done = dry_run(
        env,
        *("--image", "registry.example:5000/vision:2", "--repository", str(repository), "--artifacts", str(artifacts)),
        *("--bind", "0.0.0.0", "--shm-size", "512m", "--user", "1234:1234", "--config-name", "onnxruntime"),
        *("--ensemble", "ensemble_lite", "--stop-timeout", "7", "--container-env-file", str(variables)),
        *("--docker-option", "--memory=16g", "--docker-option", "--env=A=b c"),
        *("--", "--log-level", "info"),
    )
    command = done.command("docker", "run")
    assert values(command, "--mount") == [
        f'type=bind,"source={repository}",target=/repository,readonly',
        f"type=bind,source={artifacts},target=/artifacts",
    ]
    assert {port.split(":")[0] for port in values(command, "--publish")} == {"0.0.0.0"}
    assert values(command, "--shm-size") == ["512m"]
    assert values(command, "--user") == ["1234:1234"]
    assert values(command, "--stop-timeout") == ["7"]
    assert values(command, "--env-file") == [str(variables)]
    assert values(command, "--env") == [
        "TRITON_VISION_HEALTH_REPOSITORY=/repository",
        "TRITON_VISION_HEALTH_MODEL=ensemble_lite",
    ]
    at = command.index("registry.example:5000/vision:2")
    assert command[at - 2 : at] == ["--memory=16g", "--env=A=b c"]
    assert command[at + 1 :] == [
        *("--artifacts", "/artifacts", "--repository", "/repository", "--config-name", "onnxruntime"),
        *("--log-level", "info"),
    ]


def test_ipv6_addresses_are_written_as_docker_wants_them(env: dict[str, str]) -> None:
    published = values(dry_run(env, "--bind", "::").command("docker", "run"), "--publish")
    assert all(port.startswith("[::]:") for port in published)


def test_names_that_docker_does_not_take_get_one_of_their_own(env: dict[str, str]) -> None:
    names = []
    for name in ("my cats", "my-cats", "my/cats"):
        command = dry_run(env, "--name", name).command("docker", "run")
        assert f"triton-vision.deploy.name={name}" in command
        names += values(command, "--name")
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*-blue", name) for name in names)


def test_an_absent_image_is_pulled_and_a_present_one_only_when_told(tmp_path: Path, env: dict[str, str]) -> None:
    assert dry_run(env).commands()[0][:2] == ["docker", "run"]
    assert dry_run(env, "--pull", "--min-disk", "0").commands()[0] == ["docker", "pull", "triton-vision:latest"]
    (tmp_path / "other").mkdir()
    absent = machine(tmp_path / "other", docker=fakes.docker(image=False))
    assert dry_run(absent, "--image", "x/y:1", "--min-disk", "0").commands()[0] == ["docker", "pull", "x/y:1"]


def test_build_takes_the_projects_own_script(env: dict[str, str]) -> None:
    done = dry_run(env, "--build", "--build-option", "--build-arg=WEIGHTS=random", "--min-disk", "0")
    build = [str(ROOT / "scripts" / "image" / "build"), "triton-vision:latest", "--build-arg=WEIGHTS=random"]
    assert done.commands()[0] == build
    both = run("start", "--build", "--pull", "--min-disk", "0", *words(free_ports()), env=env)
    assert both.code == 2
    assert "say one of the two" in both.err


def test_a_proxy_takes_the_first_ports_and_the_server_the_second(env: dict[str, str]) -> None:
    ports = free_ports()
    done = run("start", "--dry-run", "--proxy", "--bind", "0.0.0.0", *words(ports), env=env)
    assert done.code == 0, done.err
    server, proxy = (words for words in done.commands() if words[:2] == ["docker", "run"])
    first = int(ports["--http-port"])
    assert values(server, "--publish") == [f"127.0.0.1:{first + 10 + n}:{8000 + n}" for n in range(3)]
    assert values(proxy, "--publish") == [f"0.0.0.0:{first + n}:{8000 + n}" for n in range(3)]
    assert values(proxy, "--env") == ["BLUE=triton-vision-blue", "GREEN=triton-vision-green"]
    assert "haproxy:lts" in proxy
    assert ["docker", "network", "create"] in [words[:3] for words in done.commands()]


def test_what_a_dry_run_prints_a_shell_reads_as_it_was_meant(env: dict[str, str]) -> None:
    command = dry_run(env, "--name", "it's $HOME", "--docker-option", "--env=A=`id`; $(id)").command("docker", "run")
    line = next(line for line in dry_run(env, "--name", "it's $HOME").out.splitlines() if line.startswith("docker run"))
    read = subprocess.run(
        ["bash", "-c", f'docker() {{ printf "%s\\n" "$@"; }}; {line}'], capture_output=True, text=True, check=True
    )
    assert "triton-vision.deploy.name=it's $HOME" in read.stdout.splitlines()
    assert "--env=A=`id`; $(id)" in command


# -- Where options come from -------------------------------------------------------------------------------------------


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    env: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "settings of mine.env"
    file.write_text(
        "# the machine in the cellar\r\n\n"
        "TRITON_VISION_IMAGE=file:1\r\n"
        "TRITON_VISION_SHM_SIZE=2g\n"
        "TRITON_VISION_NAME=cats and dogs\n"
        "TRITON_VISION_DOCKER_OPTION=--memory=1g\n"
        "TRITON_VISION_DOCKER_OPTION=--cpus=2\n"
        "TRITON_VISION_CONFIG_NAME=\n"
        "TRITON_VISION_USER=7"
    )
    variables = {**env, "TRITON_VISION_IMAGE": "environment:1", "TRITON_VISION_SHM_SIZE": "3g"}
    command = dry_run(variables, "--env-file", str(file), "--image", "line:1").command("docker", "run")
    assert "line:1" in command
    assert values(command, "--shm-size") == ["3g"]
    assert values(command, "--user") == ["7"]
    assert "triton-vision.deploy.name=cats and dogs" in command
    assert {"--memory=1g", "--cpus=2"} <= set(command)
    assert "--config-name" not in command
    assert dry_run({**env, "TRITON_VISION_ENV_FILE": str(file)}).command("docker", "run").count("file:1") == 1


def test_flags_are_words_in_the_environment(env: dict[str, str]) -> None:
    ports = words(free_ports())
    assert (
        "docker pull"
        in run("start", *ports, env={**env, "TRITON_VISION_DRY_RUN": "yes", "TRITON_VISION_PULL": "1"}).out
    )
    assert "docker pull" not in run("start", "--dry-run", *ports, env={**env, "TRITON_VISION_PULL": "no"}).out
    wrong = run("start", "--dry-run", env={**env, "TRITON_VISION_PULL": "perhaps"})
    assert (wrong.code, wrong.out) == (2, "")
    assert "TRITON_VISION_PULL is 'perhaps': say yes or no" in wrong.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("TRITON_VISION_IMGAE=x", "line 2: 'TRITON_VISION_IMGAE' is not a setting of this script"),
        ("PATH=/tmp", "line 2: 'PATH' is not a setting of this script"),
        ("export TRITON_VISION_IMAGE=x", "is not a setting of this script"),
        ("TRITON_VISION_ENV_FILE=x", "is not a setting of this script"),
        ("TRITON_VISION_IMAGE", "is not a setting of this script"),
        ('TRITON_VISION_IMAGE="x"', "line 2: write the value of TRITON_VISION_IMAGE without quotes"),
        ("TRITON_VISION_IMAGE=$(touch made)", "is not an image reference"),
    ],
)
def test_the_file_is_read_and_never_executed(line: str, message: str, env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text(f"# one\n{line}\n")
    done = run("start", "--env-file", str(file), env=env, cwd=tmp_path)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "made").exists()


def test_the_example_file_is_one(env: dict[str, str]) -> None:
    example = SCRIPT.with_name("deploy-triton.env.example")
    done = run("start", "--dry-run", "--env-file", str(example), *words(free_ports()), "--min-disk", "0", env=env)
    assert done.code == 0, done.err


@pytest.mark.parametrize("argument", ["--tls-cert=/c.pem", "--inference-token-file", "--no-http", "--grpc-port"])
def test_what_would_shut_its_own_questions_out_is_refused_at_once(env: dict[str, str], argument: str) -> None:
    done = run("start", "--dry-run", *words(free_ports()), "--", argument, "x", env=env)
    assert done.code == 2
    assert f"{argument} cannot be given here" in done.err
