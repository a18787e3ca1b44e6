//! `resourcesPolicy` in CEL: the expression of the user becomes one over floating-point thousandths, as in
//! [`crate::sidecarset::resources`].

use kruise_api::sidecarset::ResourcesPolicy;

use super::error::Unsupported;
use super::program::{Program, add};
use crate::sidecarset::resources::expression::{Arithmetic, parse, variable};
use crate::sidecarset::resources::{ExpressionError, Quantity, Resource, target_regex};
use kruise_api::cel::string;

/// Characters of one expression after its translation; the nesting that CEL allows is limited, too.
const MAX_EXPRESSION: usize = 4000;
const MAX_DEPTH: usize = 12;

/// Adds the resources of the container with this ID, which has empty limits and requests. `targets` is an expression:
/// the containers of the Pod that no set injects.
pub(super) fn add_resources(
    policy: &ResourcesPolicy,
    id: &str,
    targets: &str,
    field: &str,
    program: &mut Program,
) -> Result<(), Unsupported> {
    let regex = &policy.target_containers_name_regex;
    target_regex(regex).map_err(|why| {
        Unsupported::new(
            &format!("{field}.targetContainersNameRegex"),
            format_args!("is invalid: {why}"),
        )
    })?;
    let combine = match policy.target_containers_mode.as_str() {
        "sum" => "sum",
        "max" => "max",
        _ => {
            return Err(Unsupported::new(
                &format!("{field}.targetContainersMode"),
                "is neither sum nor max",
            ));
        }
    };
    // Without a target, its first member is an error.
    let found = program.variable(
        format!("{id}Found"),
        format!("{targets}.filter(c, string(c.name).matches({}))", string(regex)),
    );
    let targets = program.variable(
        format!("{id}Targets"),
        format!("{found}.size() > 0 ? {found} : [{found}[0]]"),
    );
    // Refers to the targets even without expressions.
    program.operation(format!("{targets}.size() > 0 ? [] : []"));
    let expressions = &policy.resources_expr;
    for (list, expressions) in [
        ("limits", &expressions.limits),
        ("requests", &expressions.requests),
    ] {
        let Some(expressions) = expressions else { continue };
        for (resource, expression) in [
            (Resource::Cpu, &expressions.cpu),
            (Resource::Memory, &expressions.memory),
        ] {
            if expression.is_empty() {
                continue;
            }
            let name = resource.as_str();
            let field = format!("{field}.resourcesExpr.{list}.{name}");
            let amount = format!("c.?resources.?{list}.?{name}");
            let total = format!(
                "{targets}.map(c, quantity(string({amount}.orValue('0'))).asApproximateFloat()).{combine}()"
            );
            let total = program.variable(format!("{id}{list}{name}"), ceil(&format!("{total} * 1000.0")));
            let result = translate(expression, &total)
                .map_err(|why| Unsupported::new(&field, format_args!("has no result: {why}")))?;
            if result.len() > MAX_EXPRESSION || depth(&result) > MAX_DEPTH {
                return Err(Unsupported::new(
                    &field,
                    "is too large for an expression of a policy",
                ));
            }
            let result = program.variable(format!("{id}{list}{name}Result"), result);
            // There is no second member: an error.
            let text = format!("string({result} < 0 ? [{result}][1] : {result}) + 'm'");
            let add = add(&string(&format!("/injected/{id}/resources/{list}/{name}")), &text);
            program.operation(match list {
                "limits" => format!("{targets}.all(c, {amount}.hasValue()) ? [{add}] : []"),
                _ => format!("[{add}]"),
            });
        }
    }
    Ok(())
}

/// The next integer, except for the error of floating-point numbers.
fn ceil(number: &str) -> String {
    format!("[{number}].map(x, double(int(x)) + (x - double(int(x)) > 0.000001 ? 1.0 : 0.0))[0]")
}

fn depth(expression: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    for c in expression.chars() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// The result in thousandths, an expression with an integer. `total` is one with a floating-point number.
fn translate(expression: &str, total: &str) -> Result<String, ExpressionError> {
    let resource = variable(expression);
    Ok(
        match parse(expression, resource, Term::Amount(total.to_owned()))? {
            Term::Amount(milli) => format!("int({milli})"),
            Term::Number(number) if number < 0.0 => return Err(ExpressionError::Negative),
            Term::Number(number) => match resource {
                Resource::Cpu => format!("int({})", milli(number)?),
                Resource::Memory => format!("int({})", milli(number.trunc())?),
            },
        },
    )
}

/// A part of an expression: a number is known, a quantity only to the API server.
#[derive(Clone, Debug)]
enum Term {
    Number(f64),
    /// An expression of thousandths.
    Amount(String),
}

use Term::{Amount, Number};

/// A number as a quantity.
fn milli(number: f64) -> Result<String, ExpressionError> {
    let quantity = Quantity::from_milli(number * 1000.0).ok_or(ExpressionError::OutOfRange)?;
    Ok(double(quantity))
}

#[allow(clippy::cast_precision_loss)]
fn double(quantity: Quantity) -> String {
    format!("{:?}", quantity.milli() as f64)
}

/// A number of CEL.
fn number(number: f64) -> Result<String, ExpressionError> {
    number
        .is_finite()
        .then(|| format!("({number:?})"))
        .ok_or(ExpressionError::OutOfRange)
}

impl Term {
    fn combine(
        self,
        other: Self,
        numbers: impl FnOnce(f64, f64) -> f64,
        amounts: impl FnOnce(String, String) -> String,
    ) -> Result<Self, ExpressionError> {
        let amount = |term| match term {
            Number(number) => milli(number),
            Amount(amount) => Ok(amount),
        };
        match (self, other) {
            (Number(one), Number(other)) => Ok(Number(numbers(one, other))),
            (one, other) => Ok(Amount(amounts(amount(one)?, amount(other)?))),
        }
    }
}

impl Arithmetic for Term {
    fn number(number: f64) -> Self {
        Number(number)
    }

    fn quantity(quantity: Quantity) -> Self {
        Amount(double(quantity))
    }

    fn add(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, |a, b| a + b, |a, b| format!("({a} + {b})"))
    }

    fn subtract(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, |a, b| a - b, |a, b| format!("({a} - {b})"))
    }

    fn multiply(self, other: Self) -> Result<Self, ExpressionError> {
        match (self, other) {
            (Number(one), Number(other)) => Ok(Number(one * other)),
            (Amount(amount), Number(factor)) | (Number(factor), Amount(amount)) => {
                Ok(Amount(format!("double(int({amount} * {}))", number(factor)?)))
            }
            (Amount(_), Amount(_)) => Err(ExpressionError::QuantityTimesQuantity),
        }
    }

    fn divide(self, other: Self) -> Result<Self, ExpressionError> {
        match (self, other) {
            (_, Amount(_)) => Err(ExpressionError::DivisionByQuantity),
            (_, Number(0.0)) => Err(ExpressionError::DivisionByZero),
            (Number(one), Number(other)) => Ok(Number(one / other)),
            (Amount(amount), Number(divisor)) => {
                Ok(Amount(format!("double(int({amount} / {}))", number(divisor)?)))
            }
        }
    }

    fn negate(self) -> Result<Self, ExpressionError> {
        Ok(match self {
            Number(number) => Number(-number),
            Amount(amount) => Amount(format!("(-({amount}))")),
        })
    }

    fn max(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, f64::max, |a, b| format!("[{a}, {b}].max()"))
    }

    fn min(self, other: Self) -> Result<Self, ExpressionError> {
        self.combine(other, f64::min, |a, b| format!("[{a}, {b}].min()"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_translated() {
        let translated = |expression| translate(expression, "t");
        for (expression, result) in [
            ("cpu", "int(t)"),
            ("max(cpu*50%, 50m)", "int([double(int(t * (0.5))), 50.0].max())"),
            ("memory+1*2", "int((t + 2000.0))"),
            (
                "1Ki - -memory/3",
                "int((1024000.0 - double(int((-(t)) / (3.0)))))",
            ),
            ("0.5", "int(500.0)"),
            ("1.5+memory*0", "int((1500.0 + double(int(t * (0.0)))))"),
        ] {
            assert_eq!(translated(expression).as_deref(), Ok(result), "{expression}");
        }
        for expression in ["cpu*cpu", "1/cpu", "cpu/0", "x", "-1", "1e308*1e308*cpu", ""] {
            assert!(translated(expression).is_err(), "{expression}");
        }
    }
}
