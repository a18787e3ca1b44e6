//! Conditions of jobs, next to those that others write.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use kruise_api::image_pull_job::{COMPLETE, FAILED, WAITING};

/// The conditions to write: those that were already in `previous` keep their time, and conditions of others are kept.
#[must_use]
pub fn merge_conditions(previous: &[Condition], mut current: Vec<Condition>) -> Vec<Condition> {
    for condition in &mut current {
        let same = |old: &&Condition| old.type_ == condition.type_ && old.status == condition.status;
        if let Some(old) = previous.iter().find(same) {
            condition.last_transition_time = old.last_transition_time.clone();
        }
    }
    let foreign = previous.iter().filter(|old| !is_own(old));
    foreign.cloned().chain(current).collect()
}

/// Whether a condition is one that the manager writes in jobs.
#[must_use]
pub fn is_own(condition: &Condition) -> bool {
    [COMPLETE, FAILED, WAITING].contains(&condition.type_.as_str())
}

/// Our conditions as they were written last, and those of others as the watch shows them, which may be behind that.
#[must_use]
pub fn known_conditions(written: &[Condition], watched: &[Condition]) -> Vec<Condition> {
    let foreign = watched.iter().filter(|condition| !is_own(condition));
    let own = written.iter().filter(|condition| is_own(condition));
    foreign.chain(own).cloned().collect()
}
