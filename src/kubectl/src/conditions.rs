//! Conditions of our kinds, whatever their type.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kruise_api::cloneset::CloneSetCondition;

/// The parts of a condition that people read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConditionText<'a> {
    pub reason: &'a str,
    pub message: &'a str,
}

/// The condition of this type, if it is true.
pub fn find_true<'a>(conditions: &'a [Condition], type_: &str) -> Option<ConditionText<'a>> {
    let is_true = |condition: &&Condition| condition.type_ == type_ && condition.status == "True";
    let condition = conditions.iter().find(is_true)?;
    Some(ConditionText {
        reason: &condition.reason,
        message: &condition.message,
    })
}

/// The same of a CloneSet.
pub fn find_true_of_clone_set<'a>(
    conditions: &'a [CloneSetCondition],
    type_: &str,
) -> Option<ConditionText<'a>> {
    let is_true = |condition: &&CloneSetCondition| condition.type_ == type_ && condition.status == "True";
    let condition = conditions.iter().find(is_true)?;
    Some(ConditionText {
        reason: &condition.reason,
        message: &condition.message,
    })
}
