//! Rules and defaults of CloneSet. The versions have the limits of an update in different places, so each also has its
//! own rules.

use serde_json::{Value, json};

use super::{
    FORBIDDEN, INVALID, SchemaRule, cel, cel_unless_stored, cel_with_expression, not_negative, object_name,
};
use crate::cloneset::NO_UPDATE_BUDGET;
use crate::json::set;
use crate::schemas::{MAX_KEY_CHARS, MAX_LABEL_CHARS};

/// Pods are kept, so none is created beyond `replicas`.
const NO_SURGE: &str = "InPlaceOnly keeps every Pod, so there is nothing to surge with; set maxSurge to 0";

/// `rule`, except for objects that were stored with the same error: scaling them must remain possible.
fn unless_stored(rule: &str) -> String {
    let before = rule.replace("self.", "oldSelf.value().");
    format!("{rule} || (oldSelf.hasValue() && !{before})")
}

/// One of these limits must allow an update to make progress, unless there are no Pods, or both were zero before: the
/// API server also applies this to the scale subresource, where a user who scales from 0 cannot change the limits.
fn update_budget(max_unavailable: &str, max_surge: &str) -> Value {
    let limits = format!(
        "[self.?{max_unavailable}.orValue(1), self.?{max_surge}.orValue(0)].exists(limit, limit != 0 && limit != '0%')"
    );
    let rule = format!("self.?replicas.orValue(1) == 0 || {}", unless_stored(&limits));
    cel_unless_stored(&rule, NO_UPDATE_BUDGET, INVALID)
}

/// A number of Pods, or a percentage without fractions, which OpenKruise would read as 0.
fn whole_percentage() -> Value {
    cel_with_expression(
        "type(self) == int ? self >= 0 && self <= 2147483647 : self.matches('^[0-9]{1,9}%$')",
        "'it is %s; give a number of Pods, 0 or greater, or a percentage such as 20%% without fraction'\
         .format([self])",
        "give a number of Pods, 0 or greater, or a percentage such as 20% without fraction",
    )
}

pub(super) fn percentage() -> Value {
    cel_with_expression(
        "type(self) == int ? self >= 0 && self <= 2147483647 : self.matches('^[0-9]{1,9}([.][0-9]{1,9})?%$')",
        "'it is %s; give a number of Pods, 0 or greater, or a percentage such as 20%%'.format([self])",
        "give a number of Pods, 0 or greater, or a percentage such as 20%",
    )
}

fn with_default(mut keywords: Value, default: Value) -> Value {
    set(&mut keywords, &["default"], default);
    keywords
}

fn partition() -> Value {
    with_default(percentage(), json!(0))
}

fn max_unavailable() -> Value {
    with_default(whole_percentage(), json!("20%"))
}

fn max_surge() -> Value {
    with_default(whole_percentage(), json!(0))
}

fn empty_default() -> Value {
    json!({ "default": {} })
}

fn number_of_nodes() -> Value {
    cel_with_expression(
        "type(self) == int ? self >= 0 && self <= 2147483647 : self.matches('^[0-9]{1,9}$')",
        "'it is %s; give a number of nodes, 0 or greater (0 pauses the pulls); percentages are not supported'\
         .format([self])",
        "give a number of nodes, 0 or greater; percentages are not supported",
    )
}

fn exclusive_priorities() -> Value {
    cel(
        "size(self.?orderPriority.orValue([])) == 0 || size(self.?weightPriority.orValue([])) == 0",
        "orderPriority and weightPriority exclude each other; remove one of them",
        FORBIDDEN,
    )
}

/// Each term is matched with each Pod, whenever these are sorted. And the API server accepts a rule for the terms of a
/// list only if their number is limited.
pub(super) fn few_terms() -> Value {
    json!({ "maxItems": 256 })
}

fn label_key() -> Value {
    json!({ "minLength": 1, "maxLength": MAX_KEY_CHARS })
}

pub(super) fn non_empty_selector() -> Value {
    cel(
        "size(self.?matchLabels.orValue({})) + size(self.?matchExpressions.orValue([])) > 0",
        "an empty selector matches every Pod; give matchLabels or matchExpressions",
        INVALID,
    )
}

pub(super) fn operators() -> Value {
    json!({ "enum": ["In", "NotIn", "Exists", "DoesNotExist"] })
}

/// The API server would refuse Pods with any other finalizer.
fn finalizer() -> Value {
    let mut keywords = cel_with_expression(
        "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$')",
        "'it is %s; Pods take only finalizers of the form DOMAIN/NAME'.format([self])",
        "Pods take only finalizers of the form DOMAIN/NAME",
    );
    set(&mut keywords, &["maxLength"], json!(MAX_KEY_CHARS));
    keywords
}

/// The API server accepts a rule for the items of a list only if their number is limited.
fn few_finalizers() -> Value {
    json!({ "maxItems": 64 })
}

/// Rules for both versions.
pub(crate) const ALL_VERSIONS: &[SchemaRule] = &[
    SchemaRule {
        path: "spec.replicas",
        add: || json!({ "minimum": 0, "default": 1 }),
    },
    SchemaRule {
        path: "spec.revisionHistoryLimit",
        add: || json!({ "minimum": 0, "default": 10 }),
    },
    SchemaRule {
        path: "spec.minReadySeconds",
        add: || json!({ "minimum": 0, "default": 0 }),
    },
    SchemaRule {
        path: "spec.progressDeadlineSeconds",
        add: not_negative,
    },
    SchemaRule {
        path: "spec",
        add: || {
            json!({ "x-kubernetes-validations": [{
                "rule": unless_stored(
                    "(!has(self.progressDeadlineSeconds) || self.progressDeadlineSeconds == 2147483647 \
                     || self.progressDeadlineSeconds > self.?minReadySeconds.orValue(0))",
                ),
                "messageExpression":
                    "'spec.progressDeadlineSeconds is %d, which is not more than spec.minReadySeconds, which is %d; \
                     no rollout could be in time'.format([self.progressDeadlineSeconds, \
                     self.?minReadySeconds.orValue(0)])",
                "message": "spec.progressDeadlineSeconds must be more than spec.minReadySeconds",
                "reason": INVALID,
                "optionalOldSelf": true,
            }] })
        },
    },
    SchemaRule {
        path: "spec.selector",
        add: || {
            cel(
                "self == oldSelf",
                "spec.selector cannot be changed, or Pods would be left behind; create another CloneSet instead",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.selector",
        add: non_empty_selector,
    },
    SchemaRule {
        path: "spec.selector.matchExpressions.[].operator",
        add: operators,
    },
    SchemaRule {
        path: "spec.template.spec.restartPolicy",
        add: || json!({ "enum": ["", "Always"] }),
    },
    SchemaRule {
        path: "spec.template.spec",
        add: || {
            cel(
                "!has(self.activeDeadlineSeconds)",
                "activeDeadlineSeconds would end Pods that are to run for ever; remove it",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.scaleStrategy.podsToDelete",
        add: || json!({ "x-kubernetes-list-type": "set", "maxItems": 10_000 }),
    },
    SchemaRule {
        path: "spec.scaleStrategy.podsToDelete.[]",
        add: object_name,
    },
    SchemaRule {
        path: "spec.scaleStrategy.maxUnavailable",
        add: whole_percentage,
    },
    SchemaRule {
        path: "spec.lifecycle.preDelete.finalizersHandler",
        add: few_finalizers,
    },
    SchemaRule {
        path: "spec.lifecycle.preDelete.finalizersHandler.[]",
        add: finalizer,
    },
    SchemaRule {
        path: "spec.lifecycle.inPlaceUpdate.finalizersHandler",
        add: few_finalizers,
    },
    SchemaRule {
        path: "spec.lifecycle.inPlaceUpdate.finalizersHandler.[]",
        add: finalizer,
    },
    SchemaRule {
        path: "spec.lifecycle.preNormal.finalizersHandler",
        add: few_finalizers,
    },
    SchemaRule {
        path: "spec.lifecycle.preNormal.finalizersHandler.[]",
        add: finalizer,
    },
    SchemaRule {
        path: "spec.updateStrategy",
        add: empty_default,
    },
];

/// Rules of v1beta1.
pub(crate) const V1BETA1: &[SchemaRule] = &[
    SchemaRule {
        path: "spec.scaleStrategy.enablePVCReuse",
        add: || json!({ "default": false }),
    },
    SchemaRule {
        path: "spec.updateStrategy.type",
        add: || json!({ "enum": ["", "OnDelete", "RollingUpdate"], "default": "RollingUpdate" }),
    },
    SchemaRule {
        path: "spec.updateStrategy.rollingUpdate",
        add: empty_default,
    },
    SchemaRule {
        path: "spec.updateStrategy.rollingUpdate.podUpdatePolicy",
        add: || json!({ "enum": ["", "ReCreate", "InPlaceIfPossible", "InPlaceOnly"], "default": "ReCreate" }),
    },
    SchemaRule {
        path: "spec",
        add: || {
            update_budget(
                "updateStrategy.?rollingUpdate.?maxUnavailable",
                "updateStrategy.?rollingUpdate.?maxSurge",
            )
        },
    },
    SchemaRule {
        path: "spec.updateStrategy.rollingUpdate",
        add: || {
            cel(
                "self.?podUpdatePolicy.orValue('') != 'InPlaceOnly' || self.?maxSurge.orValue(0) == 0 \
                 || self.maxSurge == '0%'",
                NO_SURGE,
                FORBIDDEN,
            )
        },
    },
];

/// Rules of v1alpha1.
pub(crate) const V1ALPHA1: &[SchemaRule] = &[
    SchemaRule {
        path: "spec.updateStrategy.type",
        add: || {
            json!({
                "enum": ["", "ReCreate", "InPlaceIfPossible", "InPlaceOnly", "OnDelete"],
                "default": "ReCreate",
            })
        },
    },
    SchemaRule {
        path: "spec",
        add: || update_budget("updateStrategy.?maxUnavailable", "updateStrategy.?maxSurge"),
    },
    SchemaRule {
        path: "spec.updateStrategy",
        add: || {
            cel(
                "self.?type.orValue('') != 'InPlaceOnly' || self.?maxSurge.orValue(0) == 0 || self.maxSurge == '0%'",
                NO_SURGE,
                FORBIDDEN,
            )
        },
    },
];

/// Rules of the order in which Pods come.
pub(crate) const PRIORITY_LIMITS: &[SchemaRule] = &[
    SchemaRule {
        path: "priorityStrategy",
        add: exclusive_priorities,
    },
    SchemaRule {
        path: "priorityStrategy.weightPriority",
        add: few_terms,
    },
    SchemaRule {
        path: "priorityStrategy.orderPriority",
        add: few_terms,
    },
    SchemaRule {
        path: "priorityStrategy.orderPriority.[].orderedKey",
        add: label_key,
    },
    SchemaRule {
        path: "priorityStrategy.weightPriority.[].weight",
        add: || json!({ "minimum": 0, "maximum": 100 }),
    },
    SchemaRule {
        path: "priorityStrategy.weightPriority.[].matchSelector",
        add: non_empty_selector,
    },
    SchemaRule {
        path: "priorityStrategy.weightPriority.[].matchSelector.matchExpressions.[].operator",
        add: operators,
    },
];

/// Rules of the limits of an update, at the path of each version.
pub(crate) const UPDATE_LIMITS: &[SchemaRule] = &[
    SchemaRule {
        path: "partition",
        add: partition,
    },
    SchemaRule {
        path: "maxUnavailable",
        add: max_unavailable,
    },
    SchemaRule {
        path: "maxSurge",
        add: max_surge,
    },
    SchemaRule {
        path: "scatterStrategy",
        add: || json!({ "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["key", "value"] }),
    },
    SchemaRule {
        path: "scatterStrategy",
        add: few_terms,
    },
    SchemaRule {
        path: "scatterStrategy.[].key",
        add: label_key,
    },
    SchemaRule {
        path: "scatterStrategy.[].value",
        add: || json!({ "maxLength": MAX_LABEL_CHARS }),
    },
    SchemaRule {
        path: "inPlaceUpdateStrategy.gracePeriodSeconds",
        add: not_negative,
    },
    SchemaRule {
        path: "inPlaceUpdateStrategy.imagePreDownloadParallelism",
        add: number_of_nodes,
    },
    SchemaRule {
        path: "inPlaceUpdateStrategy.imagePreDownloadTimeoutSeconds",
        add: not_negative,
    },
    SchemaRule {
        path: "inPlaceUpdateStrategy.imagePreDownloadMinUpdatedReadyPods",
        add: not_negative,
    },
];
