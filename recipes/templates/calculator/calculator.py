"""A calculator as a tool, with prompts and the reward of GSM8K."""

import ast
import operator
import re

INSTRUCTION = "Use the calculator. End with only the answer, as a number, after ####."
# characters of an expression: numbers stay small enough for the process of the training
LONGEST = 200
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# also in Markdown or with a dollar, but not the beginning of 12 - 5 = 7, 1/2, 3:00 or 1e3
_ANSWER = re.compile(r"####[\s*`$]*(-?)\$?((?>[\d,]*\.?\d+))(?!\s*[-+*/:=^×÷]\s*\d|[eE]\d)")


def calculate(expression: str) -> str:
    """
    Calculate with numbers, parentheses and the operators + - * / // %.

    Args:
        expression: An expression, such as (3 + 4) * 2.5
    """
    expression = str(expression)  # the policy may have written a number
    if len(expression) > LONGEST:
        raise ValueError(f"at most {LONGEST} characters, got {len(expression)}")
    # the policy wrote it, so nothing of it is executed: the tree has numbers and operators only
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, parentheses and + - * / // %")


def to_prompt(row: dict) -> dict[str, list[dict[str, str]]]:
    """Turn a question into a chat message."""
    return {"prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]}


def number(text: str) -> float | None:
    """Return the number after the last ####, or None."""
    matches = _ANSWER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if matches:
        sign, digits = matches[-1]
        return float(sign + digits.replace(",", ""))
    return None


def correct(completions: list, answer: list[str], **kwargs) -> list[float]:
    """Return 1 if the last message has the number of the dataset's solution, else 0."""
    numbers = [number(messages[-1]["content"]) for messages in completions]
    return [float(x is not None and x == number(solution)) for x, solution in zip(numbers, answer)]
