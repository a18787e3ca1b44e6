//! Quantities that are computed with, and written as Kubernetes writes them.

use serde_json::Value;

use crate::in_place::quantity::parse;

/// Billionths, the smallest unit of Kubernetes, in one unit.
const NANOS: i128 = 1_000_000_000;
/// Billionths in a thousandth.
const NANOS_PER_MILLI: i128 = 1_000_000;
/// The suffixes of powers of 1000, beginning with that of billionths.
const DECIMAL_SUFFIXES: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
/// The suffixes of powers of 1024.
const BINARY_SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// An amount, and the family of suffixes that it is written with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantity {
    nanos: i128,
    notation: Notation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notation {
    /// `500m`, `2G`.
    Decimal,
    /// `64Mi`.
    Binary,
    /// `1e3`.
    Exponent,
}

impl Quantity {
    /// Nothing.
    pub const ZERO: Self = Self {
        nanos: 0,
        notation: Notation::Decimal,
    };

    /// Parses a quantity of the API; `None` if it is invalid.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let notation = if text.ends_with('i') {
            Notation::Binary
        } else if text
            .trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-'))
            .ends_with(['e', 'E'])
            && !text.ends_with('E')
        {
            Notation::Exponent
        } else {
            Notation::Decimal
        };
        Some(Self {
            nanos: parse(text)?,
            notation,
        })
    }

    /// The same from JSON, where it may also be a number.
    #[must_use]
    pub fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::String(text) => Self::parse(text),
            Value::Number(number) => Self::parse(&number.to_string()),
            _ => None,
        }
    }

    /// A number of thousandths without its fraction; `None` if there are too many.
    #[must_use]
    pub fn from_milli(milli: f64) -> Option<Self> {
        #[allow(clippy::cast_possible_truncation)]
        let nanos = (milli.abs() < MAX_MILLI).then(|| milli.trunc() as i128 * NANOS_PER_MILLI)?;
        Some(Self { nanos, ..Self::ZERO })
    }

    /// Thousandths, rounded up.
    #[must_use]
    pub fn milli(self) -> i128 {
        let rest = i128::from(self.nanos.rem_euclid(NANOS_PER_MILLI) > 0);
        self.nanos.div_euclid(NANOS_PER_MILLI).saturating_add(rest)
    }

    /// Whether it is below zero.
    #[must_use]
    pub fn is_negative(self) -> bool {
        self.nanos < 0
    }

    /// The larger of both; this one if they are equal.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if other.nanos > self.nanos { other } else { self }
    }

    /// The smaller of both; this one if they are equal.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        if other.nanos < self.nanos { other } else { self }
    }

    /// The sum; `None` if it is too large.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        let notation = if self.nanos == 0 {
            other.notation
        } else {
            self.notation
        };
        let nanos = self.nanos.checked_add(other.nanos)?;
        Some(Self { nanos, notation })
    }

    /// The amount with the opposite sign.
    #[must_use]
    pub fn checked_neg(self) -> Option<Self> {
        let nanos = self.nanos.checked_neg()?;
        Some(Self { nanos, ..self })
    }

    /// `factor` of its thousandths, without the fraction of a thousandth; `None` if there are too many.
    #[must_use]
    pub fn scale(self, factor: impl FnOnce(f64) -> f64) -> Option<Self> {
        #[allow(clippy::cast_precision_loss)]
        let scaled = Self::from_milli(factor(self.milli() as f64))?;
        Some(Self {
            notation: self.notation,
            ..scaled
        })
    }
}

/// Thousandths that Kubernetes has room for.
const MAX_MILLI: f64 = 9.2e18;

impl std::fmt::Display for Quantity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = self.nanos / NANOS;
        let binary =
            self.notation == Notation::Binary && self.nanos % NANOS == 0 && units.unsigned_abs() >= 1024;
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let (mut amount, base, suffixes): (_, _, &[&str]) = if binary {
            (units, 1024, &BINARY_SUFFIXES)
        } else {
            (self.nanos, 1000, &DECIMAL_SUFFIXES)
        };
        let mut power = 0;
        while amount % base == 0 && power + 1 < suffixes.len() {
            amount /= base;
            power += 1;
        }
        match suffixes.get(power) {
            Some(_) if self.notation == Notation::Exponent && power != 3 => {
                let exponent = i64::try_from(power).unwrap_or_default() * 3 - 9;
                write!(f, "{amount}e{exponent}")
            }
            suffix => write!(f, "{amount}{}", suffix.copied().unwrap_or_default()),
        }
    }
}
