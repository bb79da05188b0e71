"""A build folder with planted tests, as cmake would leave it."""


def plant(folder, labels=(), **commands):
    """`tests`: by name, each a script of sh in a folder of its own; `labels`: of tests that are not just `planted`.
    A script that exits with 77 is skipped."""
    lines = []
    for number, (name, command) in enumerate(commands.items()):
        own = folder / str(number)
        own.mkdir()
        script = own / "script"
        script.write_text(command)
        label = dict(labels).get(name, "planted")
        lines.append(f'add_test({name} "sh" "{script}")\n'
                     f'set_tests_properties({name} PROPERTIES LABELS {label} WORKING_DIRECTORY "{own}"'
                     f' SKIP_RETURN_CODE 77)\n')
    (folder / "CTestTestfile.cmake").write_text("".join(lines))
