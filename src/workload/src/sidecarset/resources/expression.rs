//! Expressions such as `max(cpu*50%, 50m)`.
//!
//! Numbers and quantities are different types. `+`, `-`, `min` and `max` turn a number beside a quantity into a
//! quantity, `*` and `/` scale a quantity by a number, and no other combination exists.

use std::iter::Peekable;

use super::Quantity;
use super::lexer::{Lexer, Token};

/// A resource that expressions exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// CPU, in cores.
    Cpu,
    /// Memory, in bytes.
    Memory,
}

impl Resource {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Memory];

    /// Its name in lists of resources, which is also that of the variable in expressions.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

/// Longest expression in bytes.
const MAX_LENGTH: usize = 4096;
/// How deep parentheses, functions and signs may be nested.
const MAX_DEPTH: usize = 64;

/// Why an expression has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// There are more bytes than an expression may have.
    #[error("expression is longer than {MAX_LENGTH} bytes")]
    TooLong,
    /// Parentheses, functions or signs are nested too deep.
    #[error("expression is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// It ends too early, or a word is out of place.
    #[error("syntax error at {0}")]
    Syntax(String),
    /// The resource has another variable.
    #[error("undefined variable: {0}")]
    UndefinedVariable(String),
    /// Only `max` and `min` exist.
    #[error("unknown function: {0}")]
    UnknownFunction(String),
    /// `max` and `min` are of two values.
    #[error("{0} function requires exactly 2 arguments")]
    ArgumentCount(String),
    /// Its unit would be the square of one.
    #[error("multiplication of two quantities")]
    QuantityTimesQuantity,
    /// The divisor must be a number.
    #[error("division by quantity")]
    DivisionByQuantity,
    /// The divisor is 0.
    #[error("division by zero")]
    DivisionByZero,
    /// A value is larger than any quantity.
    #[error("a value is out of range")]
    OutOfRange,
    /// No resource can be below 0.
    #[error("calculation result is negative")]
    Negative,
}

/// The quantity that an expression gives when its variable is `value`.
///
/// The variable is `memory` if the text contains this word, otherwise `cpu`. It also decides what a result without a
/// unit means: thousandths of it remain for CPU, whole bytes for memory.
///
/// # Errors
///
/// If the expression is invalid, or its result is below zero or too large.
pub fn evaluate(expression: &str, value: Quantity) -> Result<Quantity, ExpressionError> {
    let variable = variable(expression);
    let result = match parse(expression, variable, Scalar::Quantity(value))? {
        Scalar::Quantity(quantity) => quantity,
        Scalar::Number(number) if number < 0.0 => return Err(ExpressionError::Negative),
        Scalar::Number(number) => match variable {
            Resource::Cpu => to_quantity(number)?,
            Resource::Memory => to_quantity(number.trunc())?,
        },
    };
    if result.is_negative() {
        return Err(ExpressionError::Negative);
    }
    Ok(result)
}

/// Checks an expression for `resource` as OpenKruise does: its variable is the plain number 1. So `memory-100Mi` is
/// refused, and `cpu*cpu` passes although it never has a result.
///
/// # Errors
///
/// If the expression is invalid, or its result is below zero or too large.
pub fn validate(expression: &str, resource: Resource) -> Result<(), ExpressionError> {
    let negative = match parse(expression, resource, Scalar::Number(1.0))? {
        Scalar::Quantity(quantity) => quantity.is_negative(),
        Scalar::Number(number) => number < 0.0,
    };
    if negative {
        return Err(ExpressionError::Negative);
    }
    Ok(())
}

/// The resource that an expression is of.
pub(in crate::sidecarset) fn variable(expression: &str) -> Resource {
    if expression.contains(Resource::Memory.as_str()) {
        Resource::Memory
    } else {
        Resource::Cpu
    }
}

/// What expressions compute with.
pub(in crate::sidecarset) trait Arithmetic: Sized + Clone {
    fn number(number: f64) -> Self;
    fn quantity(quantity: Quantity) -> Self;
    fn add(self, other: Self) -> Result<Self, ExpressionError>;
    fn subtract(self, other: Self) -> Result<Self, ExpressionError>;
    fn multiply(self, other: Self) -> Result<Self, ExpressionError>;
    fn divide(self, other: Self) -> Result<Self, ExpressionError>;
    fn negate(self) -> Result<Self, ExpressionError>;
    fn max(self, other: Self) -> Result<Self, ExpressionError>;
    fn min(self, other: Self) -> Result<Self, ExpressionError>;
}

#[derive(Clone, Copy, Debug)]
enum Scalar {
    Number(f64),
    Quantity(Quantity),
}

use Scalar::{Number, Quantity as Amount};

fn to_quantity(number: f64) -> Result<Quantity, ExpressionError> {
    Quantity::from_milli(number * 1000.0).ok_or(ExpressionError::OutOfRange)
}

impl Scalar {
    /// Both sides as quantities if one is, otherwise as numbers.
    fn combine(
        self,
        other: Self,
        numbers: impl FnOnce(f64, f64) -> f64,
        quantities: impl FnOnce(Quantity, Quantity) -> Option<Quantity>,
    ) -> Result<Self, ExpressionError> {
        let (one, other) = match (self, other) {
            (Number(one), Number(other)) => return Ok(Number(numbers(one, other))),
            (Amount(one), Amount(other)) => (one, other),
            (Amount(one), Number(other)) => (one, to_quantity(other)?),
            (Number(one), Amount(other)) => (to_quantity(one)?, other),
        };
        quantities(one, other)
            .map(Amount)
            .ok_or(ExpressionError::OutOfRange)
    }
}

impl Arithmetic for Scalar {
    fn number(number: f64) -> Self {
        Number(number)
    }

    fn quantity(quantity: Quantity) -> Self {
        Amount(quantity)
    }

    fn add(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, |a, b| a + b, Quantity::checked_add)
    }

    fn subtract(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, |a, b| a - b, |a, b| a.checked_add(b.checked_neg()?))
    }

    fn multiply(self, other: Self) -> Result<Self, ExpressionError> {
        match (self, other) {
            (Number(one), Number(other)) => Ok(Number(one * other)),
            (Amount(amount), Number(factor)) | (Number(factor), Amount(amount)) => amount
                .scale(|milli| milli * factor)
                .map(Amount)
                .ok_or(ExpressionError::OutOfRange),
            (Amount(_), Amount(_)) => Err(ExpressionError::QuantityTimesQuantity),
        }
    }

    fn divide(self, other: Self) -> Result<Self, ExpressionError> {
        match (self, other) {
            (_, Amount(_)) => Err(ExpressionError::DivisionByQuantity),
            (_, Number(0.0)) => Err(ExpressionError::DivisionByZero),
            (Number(one), Number(other)) => Ok(Number(one / other)),
            (Amount(amount), Number(divisor)) => amount
                .scale(|milli| milli / divisor)
                .map(Amount)
                .ok_or(ExpressionError::OutOfRange),
        }
    }

    fn negate(self) -> Result<Self, ExpressionError> {
        match self {
            Number(number) => Ok(Number(-number)),
            Amount(amount) => amount
                .checked_neg()
                .map(Amount)
                .ok_or(ExpressionError::OutOfRange),
        }
    }

    fn max(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, f64::max, |a, b| Some(a.max(b)))
    }

    fn min(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, f64::min, |a, b| Some(a.min(b)))
    }
}

/// Parses and computes in one pass.
pub(in crate::sidecarset) fn parse<V: Arithmetic>(
    expression: &str,
    variable: Resource,
    value: V,
) -> Result<V, ExpressionError> {
    if expression.len() > MAX_LENGTH {
        return Err(ExpressionError::TooLong);
    }
    let mut parser = Parser {
        tokens: Lexer::new(expression).peekable(),
        variable,
        value,
        depth: 0,
    };
    let result = parser.sum()?;
    match parser.tokens.next() {
        None => Ok(result),
        Some(token) => Err(syntax_error(Some(token))),
    }
}

struct Parser<'a, V> {
    tokens: Peekable<Lexer<'a>>,
    variable: Resource,
    value: V,
    depth: usize,
}

impl<V: Arithmetic> Parser<'_, V> {
    /// Takes the next token if it is this symbol.
    fn take(&mut self, symbol: char) -> bool {
        self.tokens.next_if_eq(&Ok(Token::Symbol(symbol))).is_some()
    }

    fn expect(&mut self, symbol: char) -> Result<(), ExpressionError> {
        if self.take(symbol) {
            return Ok(());
        }
        Err(syntax_error(self.tokens.next()))
    }

    fn sum(&mut self) -> Result<V, ExpressionError> {
        let mut result = self.product()?;
        loop {
            if self.take('+') {
                result = result.add(self.product()?)?;
            } else if self.take('-') {
                result = result.subtract(self.product()?)?;
            } else {
                return Ok(result);
            }
        }
    }

    fn product(&mut self) -> Result<V, ExpressionError> {
        let mut result = self.operand()?;
        loop {
            if self.take('*') {
                result = result.multiply(self.operand()?)?;
            } else if self.take('/') {
                result = result.divide(self.operand()?)?;
            } else {
                return Ok(result);
            }
        }
    }

    fn operand(&mut self) -> Result<V, ExpressionError> {
        if self.depth == MAX_DEPTH {
            return Err(ExpressionError::TooDeep);
        }
        self.depth += 1;
        let result = match self.tokens.next() {
            Some(Ok(Token::Number(number))) => V::number(number),
            Some(Ok(Token::Quantity(quantity))) => V::quantity(quantity),
            Some(Ok(Token::Symbol('-'))) => self.operand()?.negate()?,
            Some(Ok(Token::Symbol('('))) => {
                let inner = self.sum()?;
                self.expect(')')?;
                inner
            }
            Some(Ok(Token::Name(name))) if self.take('(') => self.function(name)?,
            Some(Ok(Token::Name(name))) if name == self.variable.as_str() => self.value.clone(),
            Some(Ok(Token::Name(name))) => return Err(ExpressionError::UndefinedVariable(name)),
            token => return Err(syntax_error(token)),
        };
        self.depth -= 1;
        Ok(result)
    }

    /// The rest of a function after its opening parenthesis.
    fn function(&mut self, name: String) -> Result<V, ExpressionError> {
        let one = self.sum()?;
        if !self.take(',') {
            return Err(ExpressionError::ArgumentCount(name));
        }
        let other = self.sum()?;
        self.expect(')')?;
        match name.as_str() {
            "max" => one.max(other),
            "min" => one.min(other),
            _ => Err(ExpressionError::UnknownFunction(name)),
        }
    }
}

fn syntax_error(token: Option<Result<Token, char>>) -> ExpressionError {
    ExpressionError::Syntax(match token {
        None => "the end".to_owned(),
        Some(Ok(Token::Number(number))) => number.to_string(),
        Some(Ok(Token::Quantity(quantity))) => quantity.to_string(),
        Some(Ok(Token::Name(name))) => name,
        Some(Ok(Token::Symbol(character)) | Err(character)) => format!("{character:?}"),
    })
}
