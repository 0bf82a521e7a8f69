r"""The formulas of an answer, by recursive descent. What an answer is beside formulas is `rewards.math_grammar`.

Readings of what is ambiguous:

- ``2\frac{1}{2}`` and ``2 1/2`` are mixed numbers where the fraction is proper; ``2\frac{3}{2}`` is a product.
- ``1/2x`` is (1/2) x. ``2^10`` is 2^{10}. ``\frac12`` is 1/2. ``\log`` without a base is to base 10, ``e`` and ``i`` are the constants.
- Letters in a row are a product of names; five or more are one name.
- An integer with a subscript, ``1011_2``, is a numeral of that base.
"""

from __future__ import annotations

from fractions import Fraction

from rewards.math_nodes import EMPTY, INFINITY, MINUS_ONE, Node, flat, negative, num, plain_words, product
from rewards.math_reader import MAX_DEPTH, TokenReader, nested
from rewards.math_tokens import FUNCTIONS, Token, Unreadable
from rewards.math_units import CURRENCY, FACTORS, PERCENT, SEPARATORS, unit_at

RELATIONS = frozenset(["=", "<", ">", "<=", ">=", "!=", "\\approx", "\\in"])
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = frozenset(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Phi",
        "Psi",
        "Omega",
        "ell",
    ]
)
_SENTENCE_WORDS = frozenset(["for", "where", "when", "with", "if", "then", "that", "such", "unless"])
_SIGNS = ("+", "-", "\\pm", "\\mp")
_ENDS = RELATIONS.union(
    _SIGNS,
    [
        r")",
        r"]",
        r"}",
        r"\}",
        r"|",
        r",",
        r";",
        r"\rangle",
        r"\rfloor",
        r"\rceil",
        r"&",
        r"\\",
        r"\end",
        r"\over",
        r":",
        r"\cup",
        r"\and",
        r"\or",
        r"\choose",
        r"\pmod",
    ],
)
_CLOSING = {"(": ")", "{": "}", "[": "]", "\\{": "\\}"}
_RUNS = ("sqrt", "sin", "cos", "tan", "log", "ln", "pi")  # found at the start of a run of letters


class FormulaParser(TokenReader):
    """Sums, products, powers, numbers, names, functions."""

    def sum(self) -> Node:
        terms = [self.signed_term()]
        while self.peek in _SIGNS:
            terms.append(self.signed_term())
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed_term(self) -> Node:
        sign, kinds = 1, []
        while self.peek in _SIGNS:
            token = self.take()
            sign *= -1 if token == "-" else 1
            if token.startswith("\\"):
                kinds.append(token[1:])
        term = self.term()
        for kind in kinds:
            term = Node(kind, (term,))
        return negative(term) if sign < 0 else term

    def term(self) -> Node:
        factors, num_nested = [self.factor()], 0
        while self.position < len(self.tokens):
            kind, text, _ = self.tokens[self.position]
            num_nested += text in ("/", "%")
            if num_nested > MAX_DEPTH:
                raise Unreadable("divided too often")
            if text == "*":
                self.position += 1
                factors.append(self.signed_factor())
            elif text == "/":
                self.position += 1
                factors = [Node("div", (product(factors), self.signed_factor()))]
            elif text == "\\bmod":
                self.position += 1
                factors = [Node("call", ("mod", product(factors), self.signed_factor()))]
            elif (kind == "word" and text.lower() in FACTORS) or (kind == "text" and text.lower() in FACTORS):
                self.position += 1
                factors.append(num(FACTORS[text.lower()]))
            elif kind in ("word", "text") and text.lower() in PERCENT:
                self.position += 1
                factors = [Node("pct", (product(factors),))]
            elif text == "|" and not self.in_bars:
                factors.append(self.factor())
            elif (
                text in _ENDS
                or kind == "text"
                or (kind == "word" and (text in SEPARATORS or unit_at(self.tokens, self.position) is not None))
            ):
                break
            else:
                factors.append(self.factor())
        return product(factors)

    def signed_factor(self) -> Node:
        sign = 1
        while self.peek in ("+", "-"):
            sign *= -1 if self.take() == "-" else 1
        factor = self.factor()
        return negative(factor) if sign < 0 else factor

    @nested
    def factor(self) -> Node:
        node, start = self.mixed_number() or self.atom(), self.position
        while self.position < len(self.tokens):
            if self.position > start + MAX_DEPTH and node.kind not in ("sym", "pow"):
                raise Unreadable("too many signs after a factor")
            if self.accept("^"):
                node = self.raised(node)
            elif self.peek == "!":
                count = 0
                while self.accept("!"):
                    count += 1
                if count > 2:
                    raise Unreadable("!!!")
                node = Node("call", ("factorial" if count == 1 else "factorial2", node))
            elif self.accept("%"):
                node = Node("pct", (node,))
            elif self.peek == "\\circ":
                self.position += 1
                node = self.degrees(node)
            elif self.peek == "'" and node.kind == "sym":
                self.position += 1
                node = Node("sym", (node.args[0] + "'",))
            else:
                break
        return node

    def raised(self, node: Node) -> Node:
        if self.accept("\\circ"):
            return self.degrees(node)
        here = [token.text for token in self.tokens[self.position : self.position + 3]]
        if here == ["{", "\\circ", "}"]:
            self.position += 3
            return self.degrees(node)
        if here[:1] == ["\\prime"] and node.kind == "sym":
            self.position += 1
            return Node("sym", (node.args[0] + "'",))
        if len(here) == 3 and here[0] == "{" and here[2] == "}" and here[1] in ("th", "st", "nd", "rd"):
            self.position += 3
            return node
        if self.position < len(self.tokens) and self.tokens[self.position].text in ("th", "st", "nd", "rd"):
            self.position += 1
            return node
        sign = 1
        while self.peek in ("-", "+"):
            sign *= -1 if self.take() == "-" else 1
        exponent = self.exponent()
        return Node("pow", (node, negative(exponent) if sign < 0 else exponent))

    @nested
    def exponent(self) -> Node:
        exponent = self.argument()
        return self.raised(exponent) if self.accept("^") else exponent

    def degrees(self, node: Node) -> Node:
        if self.peek in ("C", "F") or self.peek in ("Celsius", "Fahrenheit"):
            self.unit = self.take()[0]
        return Node("deg", (node,))

    def mixed_number(self) -> Node | None:
        r"""``2\frac{1}{2}`` or ``2 1/2``."""
        if self.position + 2 >= len(self.tokens) or not self.tokens[self.position].text.isdigit():
            return None
        start, whole = self.position, int(self.tokens[self.position].text)
        following = self.tokens[start + 1]
        if following.text == "\\frac":
            self.position += 1
            fraction = self.atom()
        elif following.spaced and following.text.isdigit() and [t.text for t in self.tokens[start + 2 : start + 3]] == ["/"]:
            self.position += 1
            fraction = Node("div", (self.number(), self.atom() if self.accept("/") else MINUS_ONE))
        else:
            return None
        above, below = fraction.args if fraction.kind == "div" else (fraction, fraction)
        if above.kind == below.kind == "num" and 0 < above.args[0] < below.args[0] and above.args[1] is below.args[1] is None:
            return num(whole + above.args[0] / below.args[0])
        self.position = start
        return None

    def argument(self) -> Node:
        """What a command or ``^`` takes: a group, or one thing."""
        if self.peek == "{":
            return self.group()
        if self.peek == "(":
            return self.atom()
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        if (
            token is not None
            and token.kind == "word"
            and len(token.text) > 1
            and token.text not in FUNCTIONS
            and token.text != "pi"
        ):
            self.tokens[self.position : self.position + 1] = [
                Token("word", token.text[0], token.spaced),
                Token("word", token.text[1:], False),
            ]
        return self.atom()

    def group(self) -> Node:
        self.expect("{")
        items = self.items()
        if self.peek in ("\\over", "\\choose") and len(items) == 1:
            kind = self.take()
            below = self.sum()
            self.expect("}")
            return Node("div", (items[0], below)) if kind == "\\over" else Node("call", ("binom", items[0], below))
        self.expect("}")
        return items[0] if len(items) == 1 else Node("set", tuple(flat(items)))

    @nested
    def atom(self) -> Node:
        if self.position >= len(self.tokens):
            raise Unreadable("something is missing at the end")
        kind, text, _ = self.tokens[self.position]
        if kind == "num":
            return self.number()
        if kind == "word":
            return self.word()
        if kind == "text":
            self.position += 1
            return Node("sym", (f"text {plain_words(text)}",))
        if text == "{":
            node = self.group()
            return node
        if text in ("(", "[", "\\{", "\\langle"):
            return self.bracketed()
        if text in ("\\lfloor", "\\lceil"):
            self.position += 1
            inner = self.sum()
            self.expect("\\rfloor" if text == "\\lfloor" else "\\rceil")
            return Node("call", ("floor" if text == "\\lfloor" else "ceil", inner))
        if text == "|":
            self.position += 1
            outer, self.in_bars = self.in_bars, True
            inner = self.sum()
            self.in_bars = outer
            self.expect("|")
            return Node("call", ("abs", inner))
        if text in CURRENCY:
            self.position += 1
            self.unit = CURRENCY[text]
            return self.factor()
        if text.startswith("\\"):
            self.position += 1
            return self.command(text[1:])
        raise Unreadable(f"'{text}' was not expected")

    def number(self) -> Node:
        text = self.take()
        if self.peek == "_" and text.isdigit():
            self.position += 1
            base = self.argument()
            if base.kind == "num" and base.args[1] is None and base.args[0].denominator == 1:
                return Node("base", (text.lstrip("0") or "0", int(base.args[0])))
            raise Unreadable("a subscript that is no base")
        mantissa, _, exponent = text.lower().partition("e")
        if len(exponent) > 5:
            raise Unreadable("an exponent that is too long")
        places = len(mantissa.partition(".")[2])
        value = Fraction(int(mantissa.replace(".", "")), 10**places) if places else Fraction(int(mantissa))
        if exponent:
            value, places = value * Fraction(10) ** int(exponent), max(0, places - int(exponent))
        return Node("num", (value, places if "." in text or exponent else None))

    def word(self) -> Node:
        token = self.tokens[self.position]
        text = token.text
        if text in FUNCTIONS or text == "sqrt":
            self.position += 1
            return self.command(text)
        if text in ("inf", "infinity", "Infinity", "oo"):
            self.position += 1
            return INFINITY
        if text == "pi":
            self.position += 1
            return Node("const", ("pi",))
        if text.lower() in _SENTENCE_WORDS:
            raise Unreadable(f"'{text}' is no name")
        if len(text) >= 5:
            self.position += 1
            return Node("sym", (f"text {text.casefold()}",))
        # A run of letters is a product of names; the first is taken.
        prefix = next(
            (name for name in _RUNS if len(text) > len(name) and text.startswith(name)),
            text[0],
        )
        rest = text[len(prefix) :]
        if rest:
            self.tokens[self.position] = Token("word", rest, False)
            self.tokens.insert(self.position, Token("word", prefix, token.spaced))
        if len(prefix) > 1:
            return self.word()
        self.position += 1
        return self.name(text[0])

    def name(self, letter: str) -> Node:
        if self.peek == "_":
            self.position += 1
            start = self.position
            if self.tokens[start : start + 1] and self.tokens[start].kind == "text":
                self.position += 1
            else:
                self.argument()
            subscript = "".join(token.text for token in self.tokens[start : self.position]).strip("{}")
            return Node("sym", (f"{letter}_{subscript}",))
        if letter in ("e", "i"):
            return Node("const", (letter,))
        return Node("sym", (letter,))

    def command(self, name: str) -> Node:
        if name == "frac":
            return self.fraction()
        if name == "sqrt":
            index = num(2)
            if self.accept("["):
                index = self.sum()
                self.expect("]")
            return Node("call", ("root", self.argument(), index))
        if name == "binom":
            return Node("call", ("binom", self.argument(), self.argument()))
        if name in ("pi", "infty"):
            return Node("const", ("pi",)) if name == "pi" else INFINITY
        if name == "emptyset":
            return EMPTY
        if name in _GREEK:
            return self.name(name)
        if name == "mathbb":
            return Node("const", ("set " + "".join(self.letters()),))
        if name in ("mathcal", "overline", "hat", "bar", "angle", "triangle"):
            return Node("sym", (name + "".join(self.letters()),))
        if name == "begin":
            return self.matrix()
        if name in FUNCTIONS:
            return self.call(name)
        raise Unreadable(f"\\{name} is not known")

    def fraction(self) -> Node:
        token = self.tokens[self.position] if self.position < len(self.tokens) else Token("sym", "", False)
        if token.kind == "num" and len(token.text) > 1 and token.text.isdigit():  # \frac12: one digit each
            self.tokens[self.position : self.position + 1] = [
                Token("num", token.text[0], False),
                Token("num", token.text[1:], False),
            ]
            above = self.number()
            rest = self.tokens[self.position]
            if len(rest.text) > 1:
                self.tokens[self.position : self.position + 1] = [
                    Token("num", rest.text[0], False),
                    Token("num", rest.text[1:], False),
                ]
            return Node("div", (above, self.number()))
        return Node("div", (self.argument(), self.argument()))

    def call(self, name: str) -> Node:
        base, exponent = None, None
        while self.peek in ("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                negated = self.accept("-")
                exponent = self.argument()
                exponent = negative(exponent) if negated else exponent
        if self.peek in _CLOSING:
            left = self.take()
            arguments = self.items()
            self.expect(_CLOSING[left])
            if self.peek == "^" and exponent is None and left != "{":
                self.position += 1
                exponent = self.argument()
        else:
            arguments = [self.bare_argument()]
        if exponent == MINUS_ONE and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        if len(arguments) > 1 and name not in ("max", "min", "gcd", "lcm"):
            raise Unreadable(f"several arguments of {name}")
        if name in ("log", "lg", "ln"):
            arguments.append(base if base is not None else num(10) if name != "ln" else Node("const", ("e",)))
            name = "log"
        elif base is not None:
            raise Unreadable("a subscript of a function")
        node = Node("call", (name, *arguments))
        return node if exponent is None else Node("pow", (node, exponent))

    @nested
    def bare_argument(self) -> Node:
        r"""``\sin 2x`` takes factors up to an operator or another function."""
        if self.peek in ("-", "+"):
            return negative(self.bare_argument()) if self.take() == "-" else self.bare_argument()
        factors = [self.factor()]
        while self.position < len(self.tokens):
            kind, text, _ = self.tokens[self.position]
            plain = kind == "num" or (kind == "word" and text not in FUNCTIONS and text not in SEPARATORS)
            if not plain and text.lstrip("\\") not in _GREEK and text not in ("\\pi", "\\frac", "\\sqrt"):
                break
            if kind == "word" and unit_at(self.tokens, self.position) is not None:
                break
            factors.append(self.factor())
        if self.accept("/"):
            return Node("div", (product(factors), self.factor()))
        return product(factors)
