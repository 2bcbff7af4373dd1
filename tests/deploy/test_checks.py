"""What the script finds wrong with a machine, and says before it changes anything."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from tests.deploy import fakes
from tests.deploy.script import Done, free_ports, machine, run, words

pytestmark = pytest.mark.quiet  # one deploy-triton.sh keeps out another

DRIVER_NEEDED = "580.65.06"


def start(env: dict[str, str], *arguments: str) -> Done:
    return run("start", *words(free_ports()), *arguments, env=env)


def refused(env: dict[str, str], *arguments: str) -> str:
    """What a start says that a check ends; nothing has been printed as a result."""
    done = start(env, *arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert "unexpected: docker" not in done.err
    return done.err


# -- docker ------------------------------------------------------------------------------------------------------------


def test_no_docker(tmp_path: Path) -> None:
    env = machine(tmp_path)
    assert "there is no docker here: install Docker Engine 20.10 or newer" in refused(env)
    for command in ("status", "stop", "logs", "replace"):
        done = run(command, env=env)
        assert done.code == 2
        assert "there is no docker here" in done.err


def test_a_dry_run_needs_no_docker_and_says_that_it_is_missing(tmp_path: Path) -> None:
    done = run("start", "--dry-run", *words(free_ports()), env=machine(tmp_path))
    assert done.code == 2
    assert "there is no docker here" in done.err
    assert done.commands()[0][:2] == ["docker", "pull"]
    assert done.command("docker", "run")


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            "permission denied while trying to connect to the Docker daemon socket",
            "this user may not use docker: run this as root, or add the user to the group docker",
        ),
        (
            "Cannot connect to the Docker daemon at unix:///nowhere. Is the docker daemon running?",
            "the docker engine does not answer: start it",
        ),
    ],
)
def test_an_engine_that_does_not_answer(says: str, message: str, tmp_path: Path) -> None:
    told = refused(machine(tmp_path, docker=fakes.failing(says)))
    assert message in told
    assert says in told


def test_no_engine_behind_the_real_client(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None:
        return  # the machine has none, as in test_no_docker
    env = machine(tmp_path)
    (Path(env["PATH"]) / "docker").symlink_to(docker)
    assert "the docker engine does not answer" in refused({**env, "DOCKER_HOST": f"unix://{tmp_path}/none"})


def test_an_old_engine(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker(version="19.03.15"))
    assert "this is Docker 19.03.15: install 20.10 or newer" in refused(env)


def test_an_engine_on_another_machine(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker())
    told = refused({**env, "DOCKER_HOST": "ssh://gpu-box"})
    assert "docker talks to ssh://gpu-box, another machine: run this script there" in told


def test_no_curl(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker())
    (Path(env["PATH"]) / "curl").unlink()
    assert "there is no curl here" in refused(env)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_that_it_takes_the_cpu(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker())
    done = start(env, "--dry-run")
    assert done.code == 0
    assert "no GPU: there is no NVIDIA driver here (no nvidia-smi); the server runs on the CPU" in done.err
    assert "no GPU" not in start(env, "--dry-run", "--gpus", "none").err


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ({}, "--gpus all: there is no NVIDIA driver here (no nvidia-smi): install the driver, or say --gpus none"),
        (
            {"nvidia_smi": fakes.failing("NVIDIA-SMI has failed because it couldn't communicate with the driver.")},
            "--gpus all: nvidia-smi finds no GPU: NVIDIA-SMI has failed because",
        ),
        ({"nvidia_smi": "echo 'No devices were found'"}, "--gpus all: the NVIDIA driver sees no GPU"),
        (
            {"nvidia_smi": fakes.nvidia_smi(fakes.ONE_GPU)},
            "--gpus all: docker cannot pass GPUs on: the NVIDIA Container Toolkit is not set up: "
            "install nvidia-container-toolkit, run 'nvidia-ctk runtime configure --runtime=docker', restart docker",
        ),
    ],
)
def test_a_gpu_that_was_asked_for_and_is_missing(programs: dict[str, str], message: str, tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker(), **programs)
    assert message in refused(env, "--gpus", "all")
    done = start(env, "--dry-run")
    assert done.code == 0
    assert "--gpus" not in done.command("docker", "run")


def test_what_is_there_is_taken(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker(runtimes="nvidia runc "), nvidia_smi=fakes.nvidia_smi(fakes.TWO_GPUS))
    command = start(env, "--dry-run").command("docker", "run")
    assert command[command.index("--gpus") + 1] == "all"
    command = start(env, "--dry-run", "--gpus", "0,1").command("docker", "run")
    assert command[command.index("--gpus") + 1] == '"device=0,1"'
    assert "--gpus" not in start(env, "--dry-run", "--gpus", "none").command("docker", "run")


def test_the_toolkit_counts_without_a_runtime_of_its_own(tmp_path: Path) -> None:
    env = machine(
        tmp_path,
        docker=fakes.docker(),
        nvidia_smi=fakes.nvidia_smi(fakes.ONE_GPU),
        nvidia_container_runtime_hook="true",
    )
    assert "--gpus" in start(env, "--dry-run").command("docker", "run")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("0,2", "--gpus 0,2: there is no GPU 2: this machine has 2, numbered from 0"),
        ("GPU-77777777", "--gpus GPU-77777777: there is no GPU GPU-77777777: see nvidia-smi -L"),
    ],
)
def test_a_gpu_by_a_wrong_name(wanted: str, message: str, tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker(runtimes="nvidia runc "), nvidia_smi=fakes.nvidia_smi(fakes.TWO_GPUS))
    assert message in refused(env, "--gpus", wanted)


def test_a_driver_that_is_too_old_for_the_images_cuda(tmp_path: Path) -> None:
    listing = fakes.ONE_GPU.replace("580.95.05", "570.86.15")
    env = machine(tmp_path, docker=fakes.docker(runtimes="nvidia runc "), nvidia_smi=fakes.nvidia_smi(listing))
    told = refused(env)
    assert f"the NVIDIA driver is 570.86.15, older than {DRIVER_NEEDED}, which CUDA 13 in the image needs" in told
    assert start(env, "--dry-run", "--min-driver", "0").code == 0
    assert start(env, "--dry-run", "--gpus", "none").code == 0
    assert "older than 575, which --min-driver asks for" in refused(env, "--min-driver", "575")


def test_an_image_that_does_not_say_its_cuda(tmp_path: Path) -> None:
    env = machine(
        tmp_path,
        docker=fakes.docker(runtimes="nvidia runc ", variables="PATH=/bin"),
        nvidia_smi=fakes.nvidia_smi(fakes.ONE_GPU),
    )
    done = start(env, "--dry-run")
    assert done.code == 0
    assert "the image does not say which NVIDIA driver it needs; here is 580.95.05" in done.err


# -- The image's user, disk, ports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["", "0", "root", "0:0", "root:root"])
def test_an_image_that_would_run_as_root(user: str, tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker(user=user))
    assert "give --user UID:GID" in refused(env)
    assert start(env, "--dry-run", "--user", "1000:1000").code == 0
    meant = start(env, "--dry-run", "--user", "0")
    assert meant.code == 0
    assert "warning: the server runs as root" in meant.err


def test_too_little_disk(tmp_path: Path) -> None:
    told = refused(machine(tmp_path, docker=fakes.docker()), "--min-disk", "999999")
    assert "GB are free in /, where docker keeps images, and 999999 are asked for: make room" in told


def test_every_taken_port_is_named_with_its_holder(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker())
    ports = free_ports()
    with socket.socket() as http, socket.socket() as metrics:
        for listener, option in ((http, "--http-port"), (metrics, "--metrics-port")):
            listener.bind(("127.0.0.1", int(ports[option])))
            listener.listen()
        done = run("start", *words(ports), env=env)
        assert (done.code, done.out) == (2, "")
        for option in ("--http-port", "--metrics-port"):
            assert re.search(rf"port {ports[option]} of 127.0.0.1 is taken by \S+, process {os.getpid()}:", done.err)
        assert f"port {ports['--grpc-port']} of" not in done.err
        everywhere = run("start", "--bind", "0.0.0.0", *words(ports), env=env)
        assert f"port {ports['--http-port']} of 0.0.0.0 is taken by" in everywhere.err
        elsewhere = run("start", "--dry-run", "--bind", "127.0.0.9", *words(ports), env=env)
        assert elsewhere.code == 0, elsewhere.err
    assert run("start", "--dry-run", *words(ports), env=env).code == 0


def test_a_listener_on_all_addresses_takes_the_port_of_each(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker())
    ports = free_ports()
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", int(ports["--grpc-port"])))
        listener.listen()
        assert f"port {ports['--grpc-port']} of 127.0.0.1 is taken by" in run("start", *words(ports), env=env).err


def test_a_listener_on_an_ipv4_address_by_ipv6_is_seen(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker())
    ports = free_ports()
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::ffff:127.0.0.1", int(ports["--grpc-port"])))
        listener.listen()
        assert f"port {ports['--grpc-port']} of 127.0.0.1 is taken by" in run("start", *words(ports), env=env).err
        assert run("start", "--dry-run", "--bind", "127.0.0.9", *words(ports), env=env).code == 0


def test_taken_ports_are_noticed_without_ss(tmp_path: Path) -> None:
    env = machine(tmp_path, docker=fakes.docker())
    (Path(env["PATH"]) / "ss").unlink()
    ports = free_ports()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(ports["--grpc-port"])))
        listener.listen()
        assert (
            f"port {ports['--grpc-port']} of 127.0.0.1 is taken by a program"
            in run("start", *words(ports), env=env).err
        )


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    told = refused(machine(tmp_path, docker=fakes.docker()), "--bind", "192.0.2.1")
    assert "--bind 192.0.2.1 is not an address of this machine" in told


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    told = refused(machine(tmp_path, docker=fakes.docker()), "--gpus", "all", "--min-disk", "999999")
    assert told.count("error: ") == 2
