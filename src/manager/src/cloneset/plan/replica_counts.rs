//! How many Pods to create, delete and update: the ten numbers that scaling and updating follow.

use super::limits::Limits;

/// What counts for one Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedPod {
    /// Whether it has, or counts as having, the update revision.
    pub updated: bool,
    /// Whether it waits for its deletion.
    pub preparing_delete: bool,
    /// Whether a user requested its deletion.
    pub specified: bool,
    /// Whether it is available.
    pub available: bool,
}

/// The numbers. Numbers of Pods are 0 or greater, except `update`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaCounts {
    /// Missing Pods.
    pub scale_up: i64,
    /// Of these, Pods of the current revision.
    pub scale_up_old: i64,
    /// How many of them may be created now.
    pub scale_up_limit: i64,
    /// Pods to delete.
    pub scale_down: i64,
    /// Of these, Pods of the current revision.
    pub scale_down_old: i64,
    /// How many available Pods may be deleted now.
    pub delete_ready_limit: i64,
    /// Surge Pods that are needed now.
    pub use_surge: i64,
    /// Of these, Pods of the current revision.
    pub use_surge_old: i64,
    /// Pods to update; if below 0, Pods to roll back to the current revision.
    pub update: i64,
    /// How many Pods the update may make unavailable. May be below 0.
    pub update_max_unavailable: i64,
}

/// Number of Pods of one revision.
#[derive(Clone, Copy, Default)]
struct RevisionCounts {
    total: i64,
    /// Pods that wait for their deletion.
    preparing_delete: i64,
    /// All others.
    active: i64,
    /// Active Pods specified for deletion.
    specified: i64,
    /// Active Pods neither specified nor available.
    unavailable: i64,
}

/// Calculates the numbers for these Pods. `same_revision` means that the current and the update revision are the same.
#[must_use]
pub fn replica_counts(
    pods: impl Iterator<Item = CountedPod>,
    limits: &Limits,
    same_revision: bool,
) -> ReplicaCounts {
    let (mut old, mut new) = (RevisionCounts::default(), RevisionCounts::default());
    for pod in pods {
        add_pod(if pod.updated { &mut new } else { &mut old }, pod);
    }
    let (replicas, partition) = (limits.replicas, limits.partition);
    let unavailable = old.preparing_delete + new.preparing_delete + old.unavailable + new.unavailable;
    let specified = old.specified + new.specified;
    let mut old_diff = old.active - partition;
    let mut new_diff = new.active - (replicas - partition);
    if same_revision || !limits.partition_rollback {
        (old_diff, new_diff) = (old_diff.max(0), new_diff.min(0));
    }
    let (use_surge, use_surge_old) = needed_surge(limits, unavailable, [old, new], old_diff, new_diff);

    let total = old.total + new.total;
    let (mut existing, mut existing_old) = (total, old.total);
    if limits.exclude_preparing_delete {
        (existing, existing_old) = (
            existing - old.preparing_delete - new.preparing_delete,
            existing_old - old.preparing_delete,
        );
    }
    let (desired, desired_old) = (replicas + use_surge, partition + use_surge_old);
    let if_positive = |number: i64, value: i64| if number > 0 { value.max(0) } else { 0 };
    let scale_up = (desired - existing).max(0);
    let scale_down = (existing - specified - desired).max(0);
    let update = if old_diff.abs() <= new_diff.abs() {
        old_diff
    } else {
        -new_diff
    };
    ReplicaCounts {
        scale_up,
        scale_up_old: if_positive(scale_up, desired_old - existing_old),
        scale_up_limit: if_positive(
            scale_up,
            (limits.scale_max_unavailable - unavailable).min(scale_up),
        ),
        scale_down,
        scale_down_old: if_positive(scale_down, existing_old - old.specified - desired_old),
        delete_ready_limit: if_positive(
            specified + scale_down,
            limits.max_unavailable + total - replicas - unavailable,
        ),
        use_surge,
        use_surge_old,
        update,
        update_max_unavailable: if update == 0 {
            0
        } else {
            limits.max_unavailable + total - replicas
        },
    }
}

fn add_pod(counts: &mut RevisionCounts, pod: CountedPod) {
    counts.total += 1;
    if pod.preparing_delete {
        counts.preparing_delete += 1;
        return;
    }
    counts.active += 1;
    if pod.specified {
        counts.specified += 1;
    } else if !pod.available {
        counts.unavailable += 1;
    }
}

/// How many surge Pods are needed, and how many of these of the current revision.
fn needed_surge(
    limits: &Limits,
    unavailable: i64,
    [old, new]: [RevisionCounts; 2],
    old_diff: i64,
    new_diff: i64,
) -> (i64, i64) {
    if limits.max_surge == 0 {
        return (0, 0);
    }
    let specified = old.specified + new.specified;
    let for_deletion = (unavailable + specified - limits.max_unavailable)
        .max(0)
        .min(specified);
    let for_deletion_old = (for_deletion - new.specified).max(0);
    let (mut for_update, mut for_update_old) = (0, 0);
    if old_diff.signum() * new_diff.signum() < 0 {
        let of_current = if old_diff.abs() <= new_diff.abs() {
            for_update = old_diff.abs();
            old_diff < 0
        } else {
            for_update = new_diff.abs();
            new_diff > 0
        };
        if limits.on_delete {
            // None are created in advance of an update that may never begin. Existing ones are kept, as OpenKruise
            // creates them.
            let existing = old.total + new.total - limits.replicas;
            let ahead = if of_current { old.total } else { new.total };
            for_update = for_update.min(existing).min(ahead).max(0);
        }
        for_update_old = if of_current { for_update } else { 0 };
    }
    let (needed, needed_old) = if for_deletion >= for_update {
        (for_deletion, for_deletion_old)
    } else {
        (for_update, for_update_old)
    };
    let used = limits.max_surge.min(needed);
    (used, used.min(needed_old))
}
