"""Checks what docs/vllm.md and the manual say of the router: its commands run, its settings are the defaults, its
options exist. vLLM's servers are doubles here; tests/engines/pair starts real ones as the document describes.

    documents_test.py TROUPE LIBRARY MANUAL DOCUMENT
"""
import asyncio
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

import yaml

import double
from members_test import joins
from parts import Double, Forked, Router
from servers import Process, end_supervisor, free_ports
from troupe.router.options import parser
from troupe.router.settings import Limits, Settings, Times, settings_from

SECONDS = 60


def blocks_of(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(program):
    """The arguments of each command, after the program's name."""
    found = [shlex.split(line[2:]) for block in blocks_of("console") for line in block.splitlines() if line.startswith("$ ")]
    return [words[1:] for words in found if words[0] == program]


def router_with(option):
    """The arguments of the document's router command that has this option; "": of the one without options."""
    [words] = [words for verb, *words in commands("troupe") if verb == "router" and (option in words if option else not words)]
    return words


class Documents(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        os.environ["XDG_STATE_HOME"] = str(self.folder / "state")
        self.addCleanup(end_supervisor, self.folder / "state")

    def curl(self, url):
        """Runs every curl command, with another port."""
        for words in commands("curl"):
            words = [word.replace("http://127.0.0.1:8080", url).replace("MODEL", "tiny") for word in words]
            ended = subprocess.run(["curl", *words], capture_output=True, text=True, timeout=SECONDS, check=False)
            self.assertEqual(ended.returncode, 0, f"{words}: {ended.stdout}{ended.stderr}")
            self.assertIn("[DONE]" if "-sfN" in words else "tiny" if "-d" in words else "", ended.stdout)

    @unittest.skipUnless(shutil.which("curl"), "there is no curl")
    def test_the_router_finds_the_servers_of_this_machine_and_answers_what_is_asked(self):
        words = router_with("")
        for name in ("a", "b"):
            work = joins(name, "both", 8)
            self.enterContext(Forked(name, lambda work=work: asyncio.run(double.main({}, work)), self.folder))
        self.curl(self.enterContext(Router("router", self.folder, words)).wait_for(2).url)

    @unittest.skipUnless(shutil.which("curl"), "there is no curl")
    def test_the_router_finds_servers_that_join_by_the_file_of_several_machines(self):
        """The document's hosts become this one."""
        [text] = [block for block in blocks_of("yaml") if block.startswith("cluster:")]
        certificates = self.folder / "certs"
        subprocess.run([os.environ["TROUPE_COMMAND"], "certs", "init", certificates, "--cluster", "vllm"], check=True,
                       stdout=subprocess.DEVNULL)
        file = self.folder / "vllm.yaml"
        file.write_text(text.replace("/etc/troupe/vllm", str(certificates)).replace("node-a.example.org", "127.0.0.1")
                        .replace("7400", str(free_ports(1)[0])))
        self.enterContext(Process("supervisor", [os.environ["TROUPE_COMMAND"], "node", file, "--name", "supervisor"],
                                  self.folder))
        for name in ("a", "b"):
            work = joins(name, "both", 8, file=str(file))
            self.enterContext(Forked(name, lambda work=work: asyncio.run(double.main({}, work)), self.folder))
        words = [str(file) if word == "vllm.yaml" else word for word in router_with("--deployment")]
        self.curl(self.enterContext(Router("router", self.folder, words)).wait_for(2).url)

    @unittest.skipUnless(shutil.which("curl"), "there is no curl")
    def test_the_router_is_told_the_servers(self):
        words = router_with("--prefill")
        doubles = {f"http://127.0.0.1:{port}": self.enterContext(Double(str(port), self.folder)).wait().url
                   for port in (8000, 8001)}
        at = words.index("--port")
        words = [doubles.get(word, word) for word in words[:at] + words[at + 2:]]
        self.curl(self.enterContext(Router("router", self.folder, words)).wait_for(2).url)

    def test_servers_are_configured_alike_and_by_three_keys(self):
        found = [json.loads(words[words.index("--kv-transfer-config") + 1]) for words in commands("vllm")]
        self.assertEqual([one.pop("kv_connector_extra_config", None) for one in found],
                         [None, None, {"deployment": "vllm.yaml"}])
        for one in found:
            self.assertEqual(one, {"kv_connector": "TroupeConnector", "kv_connector_module_path": "troupe.vllm",
                                   "kv_role": "kv_both"})

    def test_the_settings_are_the_defaults_and_all_that_there_are(self):
        [text] = [block for block in blocks_of("yaml") if not block.startswith("cluster:")]
        said = yaml.safe_load(text)
        self.assertEqual(dataclasses.replace(settings_from(said), engines=()), Settings())
        for key, kind in (("limits", Limits), ("times", Times)):
            self.assertEqual(set(said[key]), {one.name for one in dataclasses.fields(kind)})

    def test_the_manual_has_every_option_and_no_other(self):
        page = MANUAL.read_text(encoding="utf-8").replace("\\-", "-")
        section = page[page.index('.SS "troupe router'):]
        section = section[:section.index(".SS", 3)]
        named = set(re.findall(r"--[a-z-]+", section))
        options = {option for action in parser()._actions for option in action.option_strings if option.startswith("--")}
        self.assertEqual(named, options - {"--help"})


if __name__ == "__main__":
    os.environ["TROUPE_COMMAND"], os.environ["TROUPE_LIBRARY"] = sys.argv[1:3]
    MANUAL, DOCUMENT = map(pathlib.Path, sys.argv[3:5])
    unittest.main(argv=sys.argv[:1] + sys.argv[5:], verbosity=2)
