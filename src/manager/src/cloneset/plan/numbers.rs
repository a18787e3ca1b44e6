//! How many Pods to make, to delete and to update: the ten numbers that scaling and updating follow.

use super::limits::Limits;

/// What counts of a Pod here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Whether it has, or counts as having, the update revision.
    pub new: bool,
    /// Whether it waits for its deletion.
    pub preparing_delete: bool,
    /// Whether somebody asked for its deletion.
    pub specified: bool,
    /// Whether it is available.
    pub available: bool,
}

/// The numbers. Those of Pods are 0 or greater, but for `update`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Pods that are missing.
    pub scale_up: i64,
    /// Of these, Pods of the current revision.
    pub scale_up_old: i64,
    /// How many of them may be made now.
    pub scale_up_limit: i64,
    /// Pods that are too many.
    pub scale_down: i64,
    /// Of these, Pods of the current revision.
    pub scale_down_old: i64,
    /// How many available Pods may be deleted now.
    pub delete_ready_limit: i64,
    /// Pods beyond the number wanted that are needed now.
    pub use_surge: i64,
    /// Of these, Pods of the current revision.
    pub use_surge_old: i64,
    /// Pods to update; below 0, Pods to take back to the current revision.
    pub update: i64,
    /// How many Pods may be unavailable for the update. May be below 0.
    pub update_max_unavailable: i64,
}

/// How many Pods of one revision there are.
#[derive(Clone, Copy, Default)]
struct Class {
    total: i64,
    /// Waiting for deletion.
    preparing: i64,
    /// The others.
    active: i64,
    /// Of the active, those specified for deletion.
    specified: i64,
    /// Of the active, those neither specified nor available.
    unavailable: i64,
}

/// The numbers for these Pods; `same_revision` says whether current and update revision are one.
#[must_use]
pub fn numbers(pods: impl Iterator<Item = Counted>, limits: &Limits, same_revision: bool) -> Numbers {
    let (mut old, mut new) = (Class::default(), Class::default());
    for pod in pods {
        count(if pod.new { &mut new } else { &mut old }, pod);
    }
    let (replicas, partition) = (limits.replicas, limits.partition);
    let unavailable = old.preparing + new.preparing + old.unavailable + new.unavailable;
    let specified = old.specified + new.specified;
    let mut too_old = old.active - partition;
    let mut too_new = new.active - (replicas - partition);
    if same_revision || !limits.rollback {
        (too_old, too_new) = (too_old.max(0), too_new.min(0));
    }
    let (use_surge, use_surge_old) = surge(limits, unavailable, [old, new], too_old, too_new);

    let total = old.total + new.total;
    let (mut there, mut there_old) = (total, old.total);
    if limits.exclude_preparing_delete {
        (there, there_old) = (there - old.preparing - new.preparing, there_old - old.preparing);
    }
    let (wanted, wanted_old) = (replicas + use_surge, partition + use_surge_old);
    let if_any = |number: i64, value: i64| if number > 0 { value.max(0) } else { 0 };
    let scale_up = (wanted - there).max(0);
    let scale_down = (there - specified - wanted).max(0);
    let update = if too_old.abs() <= too_new.abs() {
        too_old
    } else {
        -too_new
    };
    Numbers {
        scale_up,
        scale_up_old: if_any(scale_up, wanted_old - there_old),
        scale_up_limit: if_any(scale_up, (limits.scale_unavailable - unavailable).min(scale_up)),
        scale_down,
        scale_down_old: if_any(scale_down, there_old - old.specified - wanted_old),
        delete_ready_limit: if_any(
            specified + scale_down,
            limits.unavailable + total - replicas - unavailable,
        ),
        use_surge,
        use_surge_old,
        update,
        update_max_unavailable: if update == 0 {
            0
        } else {
            limits.unavailable + total - replicas
        },
    }
}

fn count(class: &mut Class, pod: Counted) {
    class.total += 1;
    if pod.preparing_delete {
        class.preparing += 1;
        return;
    }
    class.active += 1;
    if pod.specified {
        class.specified += 1;
    } else if !pod.available {
        class.unavailable += 1;
    }
}

/// How many Pods are needed beyond those wanted, and how many of these of the current revision.
fn surge(
    limits: &Limits,
    unavailable: i64,
    [old, new]: [Class; 2],
    too_old: i64,
    too_new: i64,
) -> (i64, i64) {
    if limits.surge == 0 {
        return (0, 0);
    }
    let specified = old.specified + new.specified;
    let for_deletion = (unavailable + specified - limits.unavailable)
        .max(0)
        .min(specified);
    let for_deletion_old = (for_deletion - new.specified).max(0);
    let (mut for_update, mut for_update_old) = (0, 0);
    if too_old.signum() * too_new.signum() < 0 {
        let of_current = if too_old.abs() <= too_new.abs() {
            for_update = too_old.abs();
            too_old < 0
        } else {
            for_update = too_new.abs();
            too_new > 0
        };
        if limits.on_delete {
            // None are made ahead of what may never begin. Those that are there stay, as OpenKruise makes them.
            let there = old.total + new.total - limits.replicas;
            let ahead = if of_current { old.total } else { new.total };
            for_update = for_update.min(there).min(ahead).max(0);
        }
        for_update_old = if of_current { for_update } else { 0 };
    }
    let (needed, needed_old) = if for_deletion >= for_update {
        (for_deletion, for_deletion_old)
    } else {
        (for_update, for_update_old)
    };
    let used = limits.surge.min(needed);
    (used, used.min(needed_old))
}
