//! The limits of a CloneSet as numbers of Pods.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::types::Features;
use kruise_api::cloneset::{CloneSetSpec, CloneSetUpdateStrategyType};
use kruise_workload::limits::{max_surge, max_unavailable, scaled_value};

/// The limits of one CloneSet; all 0 or greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Desired number of Pods.
    pub replicas: i64,
    /// Pods that keep the current revision.
    pub partition: i64,
    /// Maximum number of Pods beyond `replicas`.
    pub max_surge: i64,
    /// Maximum number of unavailable Pods.
    pub max_unavailable: i64,
    /// Maximum number of unavailable Pods while scaling up.
    pub scale_max_unavailable: i64,
    /// Whether Pods that wait for their deletion are not counted.
    pub exclude_preparing_delete: bool,
    /// Whether a higher `partition` rolls Pods back.
    pub partition_rollback: bool,
    /// Whether Pods are updated only when a user deletes them, so that none are created in advance.
    pub on_delete: bool,
}

impl Limits {
    /// The limits that `spec` sets.
    #[must_use]
    pub fn from_spec(spec: &CloneSetSpec, features: &Features) -> Self {
        let replicas = i64::from(spec.desired_replicas());
        let partition = spec.rolling_update().and_then(|r| r.partition.as_ref());
        let scale = spec.scale_strategy.as_ref();
        Self {
            replicas,
            partition: kept_by_partition(partition, replicas),
            max_surge: max_surge(spec),
            max_unavailable: max_unavailable(spec),
            scale_max_unavailable: scale
                .and_then(|s| s.max_unavailable.as_ref())
                .map_or(i64::from(i32::MAX), |value| round_up(value, replicas)),
            exclude_preparing_delete: features.exclude_preparing_delete
                || scale.is_some_and(|s| s.exclude_preparing_delete),
            partition_rollback: features.partition_rollback,
            on_delete: on_delete(spec),
        }
    }
}

/// Whether Pods are updated only when a user deletes them.
#[must_use]
pub fn on_delete(spec: &CloneSetSpec) -> bool {
    let type_ = spec.update_strategy.as_ref().and_then(|s| s.type_.as_ref());
    type_ == Some(&CloneSetUpdateStrategyType::OnDelete)
}

/// Number of Pods that keep the current revision. Of several Pods, a percentage below 100 leaves at least one to
/// update.
fn kept_by_partition(value: Option<&IntOrString>, replicas: i64) -> i64 {
    let Some(value) = value else {
        return 0;
    };
    let kept = round_up(value, replicas);
    let keeps_all =
        matches!(value, IntOrString::String(text) if text != "100%") && replicas > 1 && kept == replicas;
    (kept - i64::from(keeps_all)).clamp(0, replicas)
}

fn round_up(value: &IntOrString, total: i64) -> i64 {
    scaled_value(value, total, f64::ceil)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kruise_api::cloneset::{CloneSetUpdateStrategy, RollingUpdateCloneSetStrategy};

    fn text(text: &str) -> Option<IntOrString> {
        Some(IntOrString::String(text.to_owned()))
    }

    fn limits(replicas: i32, rolling: RollingUpdateCloneSetStrategy) -> Limits {
        let spec = CloneSetSpec {
            replicas: Some(replicas),
            update_strategy: Some(CloneSetUpdateStrategy {
                type_: None,
                rolling_update: Some(rolling),
            }),
            ..CloneSetSpec::default()
        };
        Limits::from_spec(&spec, &Features::default())
    }

    #[test]
    fn percentages_round_per_field() {
        for (partition, kept) in [
            ("99%", 3),
            ("100%", 4),
            ("50%", 2),
            ("12.5%", 1),
            ("0%", 0),
            ("x", 0),
        ] {
            let rolling = RollingUpdateCloneSetStrategy {
                partition: text(partition),
                ..Default::default()
            };
            assert_eq!(limits(4, rolling).partition, kept, "{partition}");
        }
        let rolling = |surge: &str| RollingUpdateCloneSetStrategy {
            max_unavailable: text("25%"),
            max_surge: text(surge),
            ..Default::default()
        };
        assert_eq!(
            (
                limits(5, rolling("0")).max_unavailable,
                limits(5, rolling("0")).max_surge
            ),
            (2, 0)
        );
        assert_eq!(
            (
                limits(5, rolling("1%")).max_unavailable,
                limits(5, rolling("1%")).max_surge
            ),
            (1, 1)
        );
        assert_eq!(
            limits(4, RollingUpdateCloneSetStrategy::default()).max_unavailable,
            1
        );
        assert_eq!(limits(10_000, rolling("7%")).max_surge, 700);
    }

    /// The schema refuses such numbers, which upstream reads as 0; those already stored are used as written.
    #[test]
    fn fractional_percentages_are_exact() {
        let rolling = |unavailable: &str, surge: &str| RollingUpdateCloneSetStrategy {
            max_unavailable: text(unavailable),
            max_surge: text(surge),
            ..Default::default()
        };
        for (unavailable, surge, replicas, expected) in [
            ("12.5%", "0", 8, (1, 0)),
            ("12.5%", "0", 9, (2, 0)),
            ("12.5%", "0", 1000, (125, 0)),
            // Rounded down because there is a surge, which itself is rounded up.
            ("12.5%", "12.5%", 8, (1, 1)),
            ("12.5%", "12.5%", 9, (1, 2)),
            ("12.5%", "12.5%", 7, (0, 1)),
            ("0", "12.5%", 1000, (0, 125)),
            ("0.1%", "0", 1000, (1, 0)),
            ("0", "0.1%", 1001, (0, 2)),
            // OpenKruise limits no digits.
            ("99999999999999999999999%", "0", 8, (i64::from(i32::MAX), 0)),
        ] {
            let limits = limits(replicas, rolling(unavailable, surge));
            let context = format!("maxUnavailable {unavailable}, maxSurge {surge} of {replicas}");
            assert_eq!((limits.max_unavailable, limits.max_surge), expected, "{context}");
        }
    }

    #[test]
    fn no_surge_while_paused() {
        let rolling = RollingUpdateCloneSetStrategy {
            max_surge: Some(IntOrString::Int(3)),
            paused: true,
            ..Default::default()
        };
        assert_eq!(limits(4, rolling).max_surge, 0);
    }
}
