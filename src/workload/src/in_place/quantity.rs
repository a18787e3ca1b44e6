//! Kubernetes quantities: `500m`, `1.5Gi`, `2e3`.

/// Nanos, the smallest unit of Kubernetes, in one unit.
const NANOS: i128 = 1_000_000_000;

/// The value of a quantity in billionths, rounded up; `None` if it is invalid.
#[must_use]
pub fn parse(text: &str) -> Option<i128> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-')));
    let (number, suffix) = text.split_at(end.unwrap_or(text.len()));
    let (numerator, denominator) = factor(suffix)?;
    let (negative, digits) = match number.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let digits = [whole, fraction].concat();
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let places = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let value: i128 = digits.parse().ok()?;
    let scaled = value.checked_mul(NANOS)?.checked_mul(numerator)?;
    let divisor = denominator.checked_mul(places)?;
    let rounded = scaled.checked_add(divisor - 1)? / divisor;
    Some(if negative { -rounded } else { rounded })
}

/// The factor of a suffix, as a fraction.
fn factor(suffix: &str) -> Option<(i128, i128)> {
    if let Some(exponent) = suffix.strip_prefix(['e', 'E']).filter(|e| !e.is_empty()) {
        let exponent: i32 = exponent.parse().ok()?;
        let power = 10_i128.checked_pow(exponent.unsigned_abs())?;
        return Some(if exponent < 0 { (1, power) } else { (power, 1) });
    }
    let found = match suffix {
        "n" => (1, NANOS),
        "u" => (1, 1_000_000),
        "m" => (1, 1_000),
        "" => (1, 1),
        "k" => (1_000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (10_i128.pow(12), 1),
        "P" => (10_i128.pow(15), 1),
        "E" => (10_i128.pow(18), 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        _ => return None,
    };
    Some(found)
}

/// Whether two quantities are the same amount; invalid ones are compared as text.
#[must_use]
pub fn equal(one: &str, other: &str) -> bool {
    one == other || parse(one).is_some_and(|value| Some(value) == parse(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_compare_by_value() {
        for (one, other) in [
            ("1", "1000m"),
            ("0.5", "500m"),
            ("1Gi", "1024Mi"),
            ("1.5Gi", "1536Mi"),
            ("2e3", "2k"),
            ("5E", "5000P"),
            ("100n", "0.1u"),
            ("1e-3", "1m"),
            ("x", "x"),
        ] {
            assert!(equal(one, other), "{one} {other}");
        }
        assert!(!equal("1", "1m") && !equal("1Gi", "1G") && !equal("x", "y"));
        assert_eq!(parse("-1"), Some(-NANOS));
        for text in [
            "",
            "m",
            "1x",
            "1e",
            "1.2.3",
            "--1",
            "99999999999999999999999999999999999999Ei",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
