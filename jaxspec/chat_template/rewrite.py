"""Puts the weighing into a parsed template: into each loop and macro, and around what the sandbox does not see.

Calls, filters, tests, arithmetic and output go through the environment, which weighs them itself.
"""

# ruff: noqa: N802 - a visitor has the names of Jinja's nodes

from typing import TypeVar

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from jaxspec.chat_template.budget import NODE

_Node = TypeVar("_Node", bound=nodes.Node)

# They read other templates or change how this one is compiled; no chat template needs them.
_REFUSED = (
    nodes.Block,
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.ScopedEvalContextModifier,
    nodes.EvalContextModifier,
)
# Their bodies run as often as they please, and pay themselves each time.
_BODIES = (nodes.For, nodes.Macro, nodes.CallBlock)
# Units of going round once, and paying.
_ONCE = 8 * NODE


class RefusedError(Exception):
    """The template uses something that is not available."""


def metered(template: nodes.Template) -> nodes.Template:
    """The same template, which pays for what it does to the budget in use.

    Raises:
        RefusedError: with the line.
    """
    for node in template.find_all(_REFUSED):
        raise RefusedError(f"line {node.lineno}: {type(node).__name__.lower()} is not available in chat templates")
    out = _Meter().visit(template)
    out.body.insert(0, _pay(out, _cost(template.body)))
    return out.set_environment(template.environment)


def _cost(body: list[nodes.Node]) -> int:
    """Units of running a body once, with all of its branches but without the bodies of loops and macros in it."""
    units = _ONCE
    for node in body:
        units += NODE
        if isinstance(node, nodes.TemplateData):
            units += len(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            units += len(node.value)
        children = node.iter_child_nodes(exclude=("body",) if isinstance(node, _BODIES) else None)
        units += _cost(list(children)) - _ONCE
    return units


def _call(like: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Call:
    """A call of a method of the environment."""
    call = nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)
    call.set_lineno(like.lineno, override=True)
    return call


def _pay(like: nodes.Node, units: int) -> nodes.ExprStmt:
    statement = nodes.ExprStmt(_call(like, "pay", nodes.Const(units)))
    statement.set_lineno(like.lineno, override=True)
    return statement


class _Meter(NodeTransformer):
    def _metered_body(self, node: _Node) -> _Node:
        cost = _cost(node.body)  # type: ignore[attr-defined]
        self.generic_visit(node)
        node.body.insert(0, _pay(node, cost))  # type: ignore[attr-defined]
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._metered_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._metered_body(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        test_cost = _cost([node.test]) if node.test is not None else 0
        out = self._metered_body(node)
        if out.test is not None:
            out.test = nodes.And(_call(node, "pay", nodes.Const(test_cost)), out.test).set_lineno(node.lineno)
        return out

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(node, "concatenate", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = (node.expr, node.ops[0].expr)
        if len(node.ops) == 1 and node.ops[0].op in ("eq", "ne") and any(isinstance(s, nodes.Const) for s in sides):
            return node  # costs no more than the constant is long
        node.expr = self._weighed(node.expr)
        for operand in node.ops:
            operand.expr = self._weighed(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _call(node, "cut", node.node, *(nodes.Const(None) if b is None else b for b in bounds))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._weighed(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._weighed(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._weighed(node) if node.ctx == "load" else node

    def _weighed(self, node: nodes.Expr) -> nodes.Expr:
        return node if _is_constant(node) else _call(node, "weighed", node)


def _is_constant(node: nodes.Expr) -> bool:
    """Constants were paid for with the body that they are in."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(each, nodes.Const) for each in node.items)
    return isinstance(node, nodes.Const) or (isinstance(node, nodes.Dict) and not node.items)
