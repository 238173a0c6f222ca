"""Compiled code that notes which of its lines and branches ran, for Python 3.11.

SlipCover calls a function at each of them, which makes parsers take half as long again; here a number goes into a
list. And such code can be kept, as it takes seconds to make.
"""

from __future__ import annotations

from dis import opmap
from types import CodeType

from slipcover import branch, bytecode
from slipcover.slipcover import findlinestarts

Label = int | tuple[int, int]
"""A line, or the two of a branch."""

LIST = "_marks_of_coverage"
"""The list, in the globals of the module: a constant would have to be hashable, and Python is fast with lists."""


class _Editor(bytecode.Editor):
    """Inserts a mark where its base class inserts a call."""

    patch: bytearray | None
    branches: list[bytecode.Branch] | None

    def insert_function_call(self, offset: int, function: int, args: tuple[int], repl_length: int = 0) -> int:
        """Insert `list[number] = number`.

        Args:
            offset: Where.
            function: Which name is that of the list.
            args: Which constant is the number.
            repl_length: How many bytes of code it replaces.
        """
        if self.patch is None or self.branches is None:
            self.patch = bytearray(self.orig_code.co_code)
            self.branches = bytecode.Branch.from_code(self.orig_code)
            self.ex_table = bytecode.ExceptionTableEntry.from_code(self.orig_code)
            self.lines = bytecode.LineEntry.from_code(self.orig_code)
        mark = bytearray()
        load = bytecode.opcode_arg(bytecode.op_LOAD_CONST, *args)
        # The lowest bit of its argument is not of the name.
        mark.extend((*load, *bytecode.opcode_arg(bytecode.op_LOAD_GLOBAL, function << 1), *load))
        mark.extend(bytecode.opcode_arg(opmap["STORE_SUBSCR"], 0))
        self.max_addtl_stack = 3
        self.patch[offset : offset + repl_length] = mark
        added = len(mark) - repl_length
        for moved in (*self.lines, *self.branches, *self.ex_table):
            moved.adjust(offset, added)
        self.inserts.append(offset)
        return added


def marked(code: CodeType, labels: list[Label]) -> CodeType:
    """Return code that marks its lines, and its branches as `slipcover.branch` has named them.

    Args:
        code: Of a source file, or a part of it.
        labels: Gets what the marks stand for, one after the other.
    """
    name = len(code.co_names)
    code = code.replace(co_names=(*code.co_names, LIST))
    editor = _Editor(code)
    for position, constant in enumerate(code.co_consts):
        if isinstance(constant, CodeType):
            editor.set_const(position, marked(constant, labels))
    places: list[tuple[int, int, Label]] = []
    for start, line in findlinestarts(code):
        # No opcode goes between another and what extends its argument.
        while start >= 2 and code.co_code[start - 2] == bytecode.op_EXTENDED_ARG:
            start += 2
        places.append((start, start, line))
    for start, end, constant in editor.find_const_assignments(branch.BRANCH_NAME):
        places.append((start, end, code.co_consts[constant]))
    added = 0
    # At one place the line comes first, for the branch replaces what is there.
    for start, end, label in sorted(places, key=lambda place: (place[0], place[0] < place[1])):
        number = editor.add_const(len(labels))
        labels.append(label)
        added += editor.insert_function_call(start + added, name, (number,), end - start)
    finished: CodeType = editor.finish()
    return finished
