"""SGLang finds Troupe's transfer backend by its entry point alone, through SGLang's own loader, in fresh processes.

Run by ctest, sglang.plugin. Each test is a fork of the process that has imported SGLang, since plugins are loaded
once.
"""
import argparse
import contextlib
import importlib.metadata
import io
import logging
import os
import pathlib
import pickle
import sys
import tempfile
import tomllib
import traceback
import unittest
import unittest.mock

import sglang.srt.disaggregation.common.conn  # noqa: F401
from sglang.srt import plugins
from sglang.srt.arg_groups import choices
from sglang.srt.disaggregation import utils
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

PYPROJECT = pathlib.Path(__file__).resolve().parents[2] / "deploy/python/pyproject.toml"


def in_a_fork(function):
    """Runs it in a fork and returns its result; its exceptions are raised in the test."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = True, function()
        except BaseException:  # pylint: disable=broad-exception-caught
            said = False, traceback.format_exc()
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(said, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        well, said = pickle.load(pipe)
    os.waitpid(pid, 0)
    if not well:
        raise AssertionError(said)
    return said


class Plugin(unittest.TestCase):
    def setUp(self):
        # Installed like a wheel: with the entry points of the package, and nothing else.
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        about = folder / "troupe_kv-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: troupe-kv\nVersion: 0\n")
        groups = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
        (about / "entry_points.txt").write_text("\n".join(
            f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in named.items())
            for group, named in groups.items()))
        self.folder = str(folder)

    def loaded(self, function, installed=True, **environment):
        """Runs it in a process where SGLang has loaded its plugins. Returns the log and the result."""
        def run():
            os.environ.update(environment)
            if installed:
                sys.path.append(self.folder)
            log = io.StringIO()
            logging.basicConfig(stream=log, level=logging.WARNING, force=True)
            plugins.load_plugins()
            return log.getvalue(), function()

        return in_a_fork(run)

    @staticmethod
    def parse():
        """How SGLang's command line resolves the backend."""
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                arguments = parser.parse_args(["--model-path", "m", "--disaggregation-transfer-backend", "troupe"])
            except SystemExit:
                return said.getvalue()
        return arguments.disaggregation_transfer_backend

    def test_the_command_line_knows_it_where_the_package_is_installed(self):
        self.assertEqual(self.loaded(self.parse), ("", "troupe"))
        self.assertIn("invalid choice: 'troupe'", self.loaded(self.parse, installed=False)[1])
        self.assertIn("invalid choice: 'troupe'", self.loaded(self.parse, SGLANG_PLUGINS="another")[1])
        self.assertEqual(self.loaded(self.parse, SGLANG_PLUGINS="troupe,another")[1], "troupe")

    def test_it_has_classes_of_its_own_and_every_other_backend_those_of_sglang(self):
        def classes():
            from sglang.srt.managers import disagg_service  # has imported the names earlier
            backend = disagg_service.TransferBackend("troupe")
            assert backend is utils.TransferBackend.TROUPE
            kinds = utils.KVClassType
            ours = {kind.value: disagg_service.get_kv_class(backend, kind).__name__ for kind in kinds}
            others = {name: utils.get_kv_class(utils.TransferBackend(name), kinds.MANAGER).__name__
                      for name in ("fake", "mooncake", "nixl")}
            return ours, others, [member.value for member in utils.TransferBackend]

        before = [member.value for member in utils.TransferBackend]
        log, (ours, others, members) = self.loaded(classes)
        self.assertEqual(log, "")
        self.assertEqual(ours, {"kvargs": "KVArgs", "manager": "TroupeKVManager", "sender": "TroupeKVSender",
                                "receiver": "TroupeKVReceiver", "bootstrap_server": "TroupeKVBootstrapServer"})
        self.assertEqual(others, {"fake": "FakeKVManager", "mooncake": "MooncakeKVManager", "nixl": "NixlKVManager"})
        self.assertEqual(members, [*before, "troupe"])

    def test_another_release_of_sglang_is_named_in_one_line(self):
        def version(name, known=importlib.metadata.version):
            return "9.9.9" if name == "sglang" else known(name)

        with unittest.mock.patch("importlib.metadata.version", version):
            log, parsed = self.loaded(self.parse)
        self.assertEqual((len(log.splitlines()), parsed), (1, "troupe"))
        self.assertRegex(log, "'troupe' is for SGLang 0.5.23, and this is 9.9.9")

    def test_an_sglang_that_lacks_something_is_told_so_and_starts(self):
        def missing(*_):
            raise ImportError("cannot import name 'HookRegistry'")

        with unittest.mock.patch.object(HookRegistry, "register", missing):
            log, parsed = self.loaded(lambda: utils.TransferBackend("fake").value)
        self.assertEqual((len(log.splitlines()), parsed), (1, "fake"))
        self.assertRegex(log, "the transfer backend 'troupe' is not available: it needs SGLang 0.5.23")

    def test_it_may_be_registered_again(self):
        def again():
            from troupe.plugins import sglang as register
            for _ in range(2):
                register()
            HookRegistry.apply_hooks()
            return choices.DISAGG_TRANSFER_BACKEND_CHOICES.count("troupe"), utils.TransferBackend("troupe").value

        self.assertEqual(self.loaded(again)[1], (1, "troupe"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
