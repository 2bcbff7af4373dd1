"""Starting, looking at and ending a real container, and every way in which a start fails."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from triton_vision_client import ImageClient

from tests.deploy.engine.deployment import ENSEMBLE, PHOTO, Deployment, Docker
from tests.deploy.engine.registry import Registry
from tests.deploy.script import ROOT, free_port, machine

Make = Callable[[str], Deployment]

BROKEN_MODEL = "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('the cat ate it')\n"


def test_from_start_to_stop(docker: Docker, deploy: Make, tmp_path: Path) -> None:
    cats = deploy("cats and dogs")
    variables = tmp_path / "the container's.env"
    variables.write_text("GREETING=hello there\n")
    done = cats.start("--container-env-file", str(variables), "--", "--log-level", "info")
    (name,) = cats.containers()
    grpc = f"127.0.0.1:{cats.ports['--grpc-port']}"
    assert f"serving: {ENSEMBLE}\n" in done.out
    assert f"gRPC     {grpc}\n" in done.out

    with ImageClient(grpc, model=ENSEMBLE) as client:
        assert client.classify(PHOTO).predictions[0].label == "espresso"
    curl = re.search(r"^  (curl .*\n.*)$", done.out, re.MULTILINE)
    assert curl
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    called = subprocess.run(["bash", "-c", curl[1]], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "espresso" in called.stdout
    metrics = f"http://127.0.0.1:{cats.ports['--metrics-port']}/metrics"
    with urllib.request.urlopen(metrics, timeout=10) as answer:
        assert b"triton_vision_images_total" in answer.read()

    found = docker.inspect(name)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["ShmSize"] == 1 << 30
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-file": "5", "max-size": "10m"}}
    bound = {binding["HostIp"] for port in host["PortBindings"].values() for binding in port}
    assert bound == {"127.0.0.1"}
    assert "GREETING=hello there" in found["Config"]["Env"]
    assert docker("exec", name, "id", "-u").strip() not in ("", "0")
    docker("exec", name, "touch", "/artifacts/kept")

    status = cats("status")
    assert status.code == 0
    assert f"{name}  serving {ENSEMBLE}\n" in status.out
    assert f"({found['Image'][7:19]})" in status.out
    assert cats.callers_addresses() == [grpc, f"127.0.0.1:{int(cats.ports['--grpc-port']) + 10}"]
    deadline = time.monotonic() + 30
    while True:  # `serve` says so only after it has sent an image of its own
        logs = cats("logs", "--tail", "1000")
        assert logs.code == 0
        if "\nready: " in logs.out + logs.err:
            break
        assert time.monotonic() < deadline, logs.err
        time.sleep(0.2)

    again = cats("start", *cats.arguments())
    assert again.code == 2
    assert "'cats and dogs' runs already: use replace" in again.err
    beside = deploy("another")
    beside.ports = cats.ports
    taken = beside("start", *beside.arguments())
    assert taken.code == 2
    assert f"port {cats.ports['--grpc-port']} of 127.0.0.1 is taken by the container {name}:" in taken.err
    assert cats.containers() | beside.containers() == {name}

    ended = cats("stop")
    assert ended.code == 0
    assert "kept: the volume" in ended.err
    assert cats.containers() == set()
    assert cats("status").code == 1
    assert cats("stop").code == 0
    cats.start()
    docker("exec", name, "test", "-e", "/artifacts/kept")
    locked = hashlib.sha256(f"{docker('info', '--format', '{{.ID}}').strip()}/{cats.name}".encode()).hexdigest()
    assert list(Path("/run/lock").glob(f"triton-vision-{locked[:12]}*")) == []


def test_a_port_that_is_taken(deploy: Make) -> None:
    late = deploy("late")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(late.ports["--metrics-port"])))
        listener.listen()
        done = late("start", *late.arguments())
    assert done.code == 2
    assert f"port {late.ports['--metrics-port']} of 127.0.0.1 is taken by " in done.err
    assert late.containers() == set()


def test_a_port_that_is_taken_after_the_check(docker: Docker, deploy: Make, tmp_path: Path) -> None:
    late = deploy("late")
    # A machine whose ss sees nothing stands for the moment between the check and the start.
    blind = machine(tmp_path, ss="true")
    docker_program = shutil.which("docker")
    assert docker_program
    (Path(blind["PATH"]) / "docker").symlink_to(docker_program)
    late.docker = Docker({**docker.environment, "PATH": blind["PATH"]}, docker.image)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(late.ports["--metrics-port"])))
        listener.listen()
        done = late("start", *late.arguments())
    assert done.code == 2
    assert re.search(rf"docker does not start the container: .*{late.ports['--metrics-port']}.* already", done.err)
    assert late.containers() == set()


def test_a_model_that_does_not_load(deploy: Make, tmp_path: Path) -> None:
    repository = tmp_path / "my models, broken"
    # Alone: whatever chained it would be left out for its other models' artifacts, which a fresh checkout lacks.
    shutil.copytree(ROOT / "model_repository" / "preprocess_lite", repository / "preprocess_lite")
    (repository / "preprocess_lite" / "1" / "model.py").write_text(BROKEN_MODEL)
    tmp_path.chmod(0o755)
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)  # pytest's own are for this user alone, and the server is another
    broken = deploy("broken")
    done = broken("start", *broken.arguments("--repository", str(repository)))
    assert (done.code, done.out) == (1, "")
    assert "does not serve: it ended with exit code 2" in done.err
    assert "the cat ate it" in done.err
    assert "what to do: " in done.err
    assert broken.containers() == set()


def test_an_ensemble_that_is_not_served(deploy: Make) -> None:
    done = (missing := deploy("missing"))("start", *missing.arguments("--ensemble", "ensemble_of_mine"))
    assert (done.code, done.out) == (1, "")
    assert re.search(rf"it does not serve the ensemble ensemble_of_mine, only: .*{ENSEMBLE}", done.err)
    assert missing.containers() == set()


def test_a_server_that_docker_calls_unhealthy(deploy: Make) -> None:
    never = ("--health-cmd=echo no good; exit 1", "--health-retries=1", "--health-start-period=1ms")
    options = [word for option in never for word in ("--docker-option", option)]
    done = (ill := deploy("ill"))("start", *ill.arguments(*options))
    assert (done.code, done.out) == (1, "")
    assert "docker's health check says unhealthy: no good" in done.err
    assert ill.containers() == set()


def test_a_server_that_takes_too_long(deploy: Make) -> None:
    done = (slow := deploy("slow"))("start", *slow.arguments("--timeout", "1"))
    assert (done.code, done.out) == (1, "")
    assert "it was not ready within 1 s (--timeout)" in done.err
    assert slow.containers() == set()


def test_a_start_that_is_cut_off_leaves_nothing(deploy: Make) -> None:
    cut = deploy("cut off")
    with cut.begin("start", *cut.arguments()) as script:
        assert script.stderr is not None
        for line in script.stderr:
            if "waiting until it serves" in line:
                break
        assert len(cut.containers()) == 1
        # Meanwhile nobody else may touch the same deployment.
        other = cut("stop")
        assert other.code == 2
        assert "another deploy-triton.sh is at work on 'cut off'" in other.err
        script.send_signal(signal.SIGTERM)
        script.stderr.read()
    assert script.returncode == 143
    assert cut.containers() == set()


def test_a_crash_is_restarted_by_docker_and_shown_by_status(docker: Docker, deploy: Make) -> None:
    cats = deploy("crashing")
    cats.start()
    (name,) = cats.containers()

    def wait_ready(times: int) -> None:
        deadline = time.monotonic() + 60
        while docker("logs", name).count("ready: ") < times:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    # Triton alone is restarted by serve …
    wait_ready(1)
    docker("exec", name, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children | cut -d ' ' -f 1)")
    wait_ready(2)
    assert docker.inspect(name)["RestartCount"] == 0
    # … and serve by docker.
    os.kill(docker.inspect(name)["State"]["Pid"], signal.SIGKILL)
    while docker.inspect(name)["RestartCount"] == 0:
        docker("ps")
    assert "restarts 1" in cats("status").out


def test_an_image_that_cannot_be_pulled(deploy: Make) -> None:
    absent = deploy("absent")
    image = f"127.0.0.1:{free_port()}/nothing:1"
    done = absent("start", *absent.arguments("--image", image, "--min-disk", "0"))
    assert done.code == 2
    assert f"{image} cannot be pulled: check the name and 'docker login', or build it here with --build" in done.err
    assert absent.containers() == set()


@pytest.mark.parametrize("told", [(), ("--pull",)])
def test_an_image_is_pulled(docker: Docker, deploy: Make, told: tuple[str, ...]) -> None:
    with Registry() as registry:
        pulled = deploy("pulled")
        done = pulled("start", *pulled.arguments("--image", registry.image, "--min-disk", "1", *told))
        assert f"pulling {registry.image} …" in done.err
        # It is here, and holds no server.
        docker("image", "rm", registry.image)
        assert done.code == 2
        assert re.search("docker does not start the container: .*/nothing", done.err)
    assert pulled.containers() == set()


def test_an_image_that_is_built_for_it(docker: Docker, deploy: Make, tmp_path: Path) -> None:
    """The project's own build, of another file than Dockerfile.triton, which tests/image builds for minutes."""
    file = tmp_path / "a file"
    file.write_text(f"FROM {docker.image}\nARG COLOUR\nLABEL colour=$COLOUR\n")
    built = deploy("built")
    options = [word for option in (f"--file={file}", "--build-arg=COLOUR=red") for word in ("--build-option", option)]
    arguments = built.arguments("--build", *options, "--image", "triton-vision-test/built:1", "--min-disk", "1")
    done = built("start", *arguments)
    assert done.code == 0, done.err
    (name,) = built.containers()
    assert docker.inspect(name)["Config"]["Labels"]["colour"] == "red"
    file.write_text("FROM nothing\nBUILD\n")
    done = built("replace", "--build", *options, "--min-disk", "1")
    assert done.code == 2
    assert "triton-vision-test/built:1 was not built: the lines above say why" in done.err
    assert built("status").code == 0


@pytest.mark.parametrize("gpus", ["all", "0"])
def test_a_gpu_that_is_missing(docker: Docker, deploy: Make, gpus: str, tmp_path: Path) -> None:
    blind = machine(tmp_path)  # whatever this machine has, that one has no NVIDIA driver
    docker_program = shutil.which("docker")
    assert docker_program
    (Path(blind["PATH"]) / "docker").symlink_to(docker_program)
    wanting = deploy("wanting")
    wanting.docker = Docker({**docker.environment, "PATH": blind["PATH"]}, docker.image)
    done = wanting("start", *wanting.arguments("--gpus", gpus))
    assert done.code == 2
    assert f"--gpus {gpus}: there is no NVIDIA driver here" in done.err
    assert wanting.containers() == set()


def test_the_toolkit_of_the_real_engine(docker: Docker, deploy: Make, tmp_path: Path) -> None:
    """A driver without the NVIDIA Container Toolkit: the driver is pretended, what the engine has is asked of it."""
    runtimes = docker("info", "--format", "{{json .Runtimes}}")
    assert "nvidia" not in runtimes, "this test needs an engine without NVIDIA's runtime"
    listing = "0, GPU-11111111-2222-3333-4444-555555555555, 580.95.05"
    bare = machine(tmp_path, nvidia_smi=f"echo '{listing}'")
    docker_program = shutil.which("docker")
    assert docker_program
    (Path(bare["PATH"]) / "docker").symlink_to(docker_program)
    wanting = deploy("wanting")
    wanting.docker = Docker({**docker.environment, "PATH": bare["PATH"]}, docker.image)
    done = wanting("start", *wanting.arguments("--gpus", "all"))
    assert done.code == 2
    assert "the NVIDIA Container Toolkit is not set up" in done.err
