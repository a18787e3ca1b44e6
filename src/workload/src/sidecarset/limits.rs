//! Numbers of Pods in the update strategy.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// How many of `total` Pods keep the old containers; 0 when absent or invalid. A percentage below 100 leaves at least
/// one of several Pods to update.
#[must_use]
pub fn partition(value: Option<&IntOrString>, total: usize) -> usize {
    let kept = value.map_or(0, |value| rounded_up(value, total));
    let kept = kept.min(total);
    match value {
        Some(IntOrString::String(text)) if text != "100%" && total > 1 && kept == total => total - 1,
        _ => kept,
    }
}

/// How many of `total` Pods may be unavailable; 1 when absent, 0 when invalid.
#[must_use]
pub fn max_unavailable(value: Option<&IntOrString>, total: usize) -> usize {
    value.map_or(1, |value| rounded_up(value, total))
}

/// A number, or a whole percentage of `total`; 0 if it is neither or negative.
fn rounded_up(value: &IntOrString, total: usize) -> usize {
    let number = match value {
        IntOrString::Int(number) => i128::from(*number),
        IntOrString::String(text) => {
            let percent: Option<i64> = text.strip_suffix('%').and_then(|percent| percent.parse().ok());
            let total = i128::try_from(total).unwrap_or(0);
            let hundredths = i128::from(percent.unwrap_or(0)).saturating_mul(total);
            hundredths.saturating_add(99).div_euclid(100)
        }
    };
    usize::try_from(number.max(0)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> IntOrString {
        IntOrString::String(text.to_owned())
    }

    #[test]
    fn partition_leaves_a_pod_to_update() {
        for (value, total, kept) in [
            (IntOrString::Int(3), 10, 3),
            (IntOrString::Int(30), 10, 10),
            (IntOrString::Int(-1), 10, 0),
            (text("0%"), 10, 0),
            (text("1%"), 10, 1),
            (text("99%"), 10, 9),
            (text("100%"), 10, 10),
            (text("101%"), 10, 9),
            (text("99%"), 1, 1),
            (text("50%"), 3, 2),
            (text("-50%"), 3, 0),
            (text("5.5%"), 3, 0),
            (text("3"), 10, 0),
            (text("9223372036854775807%"), usize::MAX, usize::MAX - 1),
        ] {
            assert_eq!(partition(Some(&value), total), kept, "{value:?} of {total}");
        }
        assert_eq!(partition(None, 10), 0);
    }

    #[test]
    fn max_unavailable_is_one_by_default() {
        assert_eq!(max_unavailable(None, 0), 1);
        assert_eq!(max_unavailable(Some(&text("10%")), 11), 2);
        assert_eq!(max_unavailable(Some(&text("x")), 11), 0);
        assert_eq!(max_unavailable(Some(&IntOrString::Int(-2)), 11), 0);
        assert_eq!(max_unavailable(Some(&IntOrString::Int(20)), 11), 20);
    }
}
