//! Numbers of Pods that specs set, as numbers or as percentages.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use kruise_api::cloneset::CloneSetSpec;

/// Default of `maxUnavailable`, in percent.
const DEFAULT_MAX_UNAVAILABLE: f64 = 20.0;

/// Maximum number of Pods of a CloneSet beyond its replicas; 0 while it is paused.
#[must_use]
pub fn max_surge(spec: &CloneSetSpec) -> i64 {
    let rolling = spec.rolling_update().filter(|r| !r.paused);
    let surge = rolling.and_then(|r| r.max_surge.as_ref());
    surge.map_or(0, |value| scaled_value(value, replicas(spec), f64::ceil))
}

/// Maximum number of unavailable Pods of a CloneSet.
#[must_use]
pub fn max_unavailable(spec: &CloneSetSpec) -> i64 {
    let (replicas, surge) = (replicas(spec), max_surge(spec));
    match spec.rolling_update().map(|r| r.max_unavailable.as_ref()) {
        // As upstream's `OnDelete`; our CRD adds `rollingUpdate` for every type.
        None => percent_of(DEFAULT_MAX_UNAVAILABLE, replicas, f64::floor),
        Some(None) if surge == 0 => percent_of(DEFAULT_MAX_UNAVAILABLE, replicas, f64::ceil),
        Some(None) => percent_of(DEFAULT_MAX_UNAVAILABLE, replicas, f64::floor),
        Some(Some(value)) if surge == 0 => scaled_value(value, replicas, f64::ceil),
        Some(Some(value)) => scaled_value(value, replicas, f64::floor),
    }
}

fn replicas(spec: &CloneSetSpec) -> i64 {
    spec.desired_replicas().into()
}

/// A number, or a percentage of `total`; an invalid or negative value is 0.
#[must_use]
pub fn scaled_value(value: &IntOrString, total: i64, round: fn(f64) -> f64) -> i64 {
    match value {
        IntOrString::Int(number) => i64::from(*number).max(0),
        IntOrString::String(text) => {
            let percent = text.strip_suffix('%').unwrap_or(text).parse().unwrap_or(0.0);
            percent_of(percent, total, round)
        }
    }
}

/// `percent` percent of `total`; 0 or greater, and no more than a field of the spec can hold.
#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
#[must_use]
pub fn percent_of(percent: f64, total: i64, round: fn(f64) -> f64) -> i64 {
    // A whole number of Pods must not be rounded up because the product is inexact.
    let exact = (percent * total as f64 * 1e4).round() / 1e6;
    (round(exact) as i64).clamp(0, i32::MAX.into())
}
