//! Quantities in the canonical form in which Go writes them: `1000m` is `1`, and `0.5Gi` is `512Mi`.

use std::iter::repeat_n;

/// Longest text that is read as a quantity, in bytes: far more digits than any amount has.
const MAX_BYTES: usize = 256;
/// Exponent of the smallest unit that Go keeps.
const NANO: i64 = -9;
/// Exponent of the smallest unit of a resource.
const MILLI: i64 = -3;
/// Suffixes of powers of ten, from [`NANO`] in steps of three.
const DECIMAL_SUFFIXES: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
/// Suffixes of powers of 1024.
const BINARY_SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
/// Quantities with binary suffixes are at most this much.
const MAX_BINARY: u128 = i64::MAX as u128;
/// Quantities below this are written with decimal suffixes.
const MIN_BINARY: u128 = 1024;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Decimal,
    Exponent,
    Binary,
}

/// `digits × 10^exponent`.
#[derive(Clone, Debug, PartialEq)]
struct Quantity {
    negative: bool,
    /// ASCII digits without leading zeros; none for 0.
    digits: Vec<u8>,
    exponent: i64,
    format: Format,
}

/// The quantity as Go writes it; `None` if it is none, or one that Go would write as another amount.
#[must_use]
pub fn canonical(text: &str) -> Option<String> {
    Quantity::parse(text.trim())?.rounded_up(NANO).to_text()
}

/// The same, rounded up to thousandths, as the API server does with resources.
#[must_use]
pub fn canonical_milli(text: &str) -> Option<String> {
    Quantity::parse(text.trim())?.rounded_up(MILLI).to_text()
}

impl Quantity {
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() || text.len() > MAX_BYTES {
            return None;
        }
        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let (whole, rest) = split_digits(unsigned);
        let (fraction, suffix) = rest.strip_prefix('.').map_or(("", rest), split_digits);
        let digits = whole
            .bytes()
            .chain(fraction.bytes())
            .skip_while(|digit| *digit == b'0');
        let mut quantity = Self {
            negative: text.starts_with('-'),
            digits: digits.collect(),
            exponent: -i64::try_from(fraction.len()).ok()?,
            format: Format::Decimal,
        };
        let exponent = |found: Option<usize>| found.and_then(|at| i64::try_from(at).ok());
        let decimal = DECIMAL_SUFFIXES.iter().position(|known| *known == suffix);
        let binary = BINARY_SUFFIXES.iter().position(|known| *known == suffix);
        if let Some(at) = exponent(decimal) {
            quantity.exponent += NANO + 3 * at;
        } else if let Some(at) = binary {
            quantity.format = Format::Binary;
            (0..10 * at).for_each(|_| quantity.double());
            quantity = quantity.rounded_up(NANO).at_most_max();
        } else {
            let power: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            quantity.format = Format::Exponent;
            quantity.exponent += i64::from(power);
        }
        Some(quantity)
    }

    fn double(&mut self) {
        let mut carry = 0;
        for digit in self.digits.iter_mut().rev() {
            let doubled = (*digit - b'0') * 2 + carry;
            carry = doubled / 10;
            *digit = b'0' + doubled % 10;
        }
        if carry > 0 {
            self.digits.insert(0, b'0' + carry);
        }
    }

    /// Without the digits below `10^exponent`; they round the amount up, away from zero.
    fn rounded_up(mut self, exponent: i64) -> Self {
        if self.exponent >= exponent || self.digits.is_empty() {
            return self;
        }
        let dropped = usize::try_from(exponent - self.exponent).unwrap_or(usize::MAX);
        let kept = self.digits.len().saturating_sub(dropped);
        let exact = self.digits.drain(kept..).all(|digit| digit == b'0');
        self.exponent = exponent;
        if !exact {
            self.increment();
        }
        self
    }

    fn increment(&mut self) {
        for digit in self.digits.iter_mut().rev() {
            if *digit < b'9' {
                *digit += 1;
                return;
            }
            *digit = b'0';
        }
        self.digits.insert(0, b'1');
    }

    fn at_most_max(mut self) -> Self {
        let (whole, exact) = self.whole();
        if whole.is_none_or(|whole| whole > MAX_BINARY || (whole == MAX_BINARY && !exact)) {
            self.digits = MAX_BINARY.to_string().into_bytes();
            self.exponent = 0;
        }
        self
    }

    /// The amount without its fraction, unless it is too large, and whether there is no fraction.
    fn whole(&self) -> (Option<u128>, bool) {
        let places = usize::try_from(self.exponent.saturating_neg()).unwrap_or(0);
        let split = self.digits.len().saturating_sub(places);
        let (whole, fraction) = self.digits.split_at_checked(split).unwrap_or_default();
        let mut amount = Some(0_u128);
        for digit in whole {
            amount = amount.and_then(|amount| {
                let tenfold = amount.checked_mul(10)?;
                tenfold.checked_add(u128::from(*digit - b'0'))
            });
        }
        (amount, fraction.iter().all(|digit| *digit == b'0'))
    }

    fn to_text(&self) -> Option<String> {
        let sign = if self.negative { "-" } else { "" };
        if self.digits.is_empty() {
            return Some("0".to_owned());
        }
        if self.format == Format::Binary
            && let (Some(mut amount @ MIN_BINARY..), true) = self.whole()
        {
            let mut at = 0;
            while amount % 1024 == 0 && at + 1 < BINARY_SUFFIXES.len() {
                amount /= 1024;
                at += 1;
            }
            return Some(format!("{sign}{amount}{}", BINARY_SUFFIXES.get(at)?));
        }
        let zeros = self
            .digits
            .iter()
            .rev()
            .take_while(|digit| **digit == b'0')
            .count();
        let exponent = self.exponent.checked_add(i64::try_from(zeros).ok()?)?;
        // To a multiple of three.
        let added = exponent.rem_euclid(3);
        let exponent = exponent - added;
        let significant = self.digits.iter().take(self.digits.len() - zeros).copied();
        let digits = significant.chain(repeat_n(b'0', usize::try_from(added).ok()?));
        let digits: String = digits.map(char::from).collect();
        let suffix = match (self.format, exponent) {
            (Format::Exponent, 0) => String::new(),
            (Format::Exponent, _) => format!("e{exponent}"),
            _ => {
                let at = usize::try_from((exponent - NANO) / 3).ok()?;
                (*DECIMAL_SUFFIXES.get(at)?).to_owned()
            }
        };
        Some(format!("{sign}{digits}{suffix}"))
    }
}

/// The leading ASCII digits, and the rest.
fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_written_as_go_writes_them() {
        for (text, go) in [
            ("0", "0"),
            ("-0", "0"),
            ("0Gi", "0"),
            ("0.000e3", "0"),
            ("1000m", "1"),
            ("0.5", "500m"),
            (" +1.50 ", "1500m"),
            ("-1500m", "-1500m"),
            ("1e-1", "100e-3"),
            ("1e9", "1e9"),
            ("1E3", "1e3"),
            ("1e+2", "100"),
            ("129e6", "129e6"),
            ("1000e0", "1e3"),
            ("123456789", "123456789"),
            ("100k", "100k"),
            ("1024", "1024"),
            ("1024Ki", "1Mi"),
            ("0.5Gi", "512Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Ki", "512"),
            ("1.0001Ki", "1024102400u"),
            ("-2048Ki", "-2Mi"),
            ("1024Ei", "9223372036854775807"),
            ("8Ei", "9223372036854775807"),
            ("7Ei", "7Ei"),
            ("0.1n", "1n"),
            ("-1.1n", "-2n"),
            ("9.9999999999", "10"),
            ("1e-2147483648", "1e-9"),
            ("1e2147483647", "10e2147483646"),
            ("00012", "12"),
            ("1.", "1"),
            (".5", "500m"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(go), "{text}");
        }
        for text in [
            "",
            " ",
            "x",
            "1x",
            "1e",
            "1 m",
            "--1",
            "1.2.3",
            "1ki",
            "1e99999999999",
            "1000E",
            &"1".repeat(257),
        ] {
            assert_eq!(canonical(text), None, "{text}");
        }
    }

    #[test]
    fn resources_are_rounded_up_to_thousandths() {
        for (text, go) in [
            ("0.0001", "1m"),
            ("1.0001Ki", "1024103m"),
            ("1500u", "2m"),
            ("1e-4", "1e-3"),
            ("999.9999", "1k"),
            ("-1500u", "-2m"),
            ("2", "2"),
        ] {
            assert_eq!(canonical_milli(text).as_deref(), Some(go), "{text}");
        }
    }

    proptest! {
        /// The canonical form of the canonical form is the same, whatever the text.
        #[test]
        fn canonical_form_is_stable(text in "[-+]?[0-9]{0,25}[.]?[0-9]{0,15}([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,3}|)", other in ".{0,8}") {
            for text in [text, other] {
                if let Some(once) = canonical(&text) {
                    prop_assert_eq!(canonical(&once), Some(once.clone()), "{}", text);
                }
                if let Some(once) = canonical_milli(&text) {
                    prop_assert_eq!(canonical_milli(&once), Some(once.clone()), "{}", text);
                    prop_assert_eq!(canonical(&once), Some(once.clone()), "{}", text);
                }
            }
        }
    }
}
