//! Rules of CloneSet, and the values of what is absent. The versions differ in where the limits of an update
//! stand, so each has rules of its own too.

use serde_json::{Value, json};

use super::{FORBIDDEN, INVALID, Rule, name, not_negative, says, says_unless_stored, tells};
use crate::cloneset::NO_ROOM;
use crate::json::set;
use crate::schemas::{LONGEST_KEY, LONGEST_LABEL};

/// Pods stay, so none is made beyond `replicas`.
const NO_SURGE: &str = "InPlaceOnly keeps every Pod, so there is nothing to surge with; set maxSurge to 0";

/// `rule`, which an object that is stored with the mistake need not meet: it must be possible to scale it.
fn unless_before(rule: &str) -> String {
    let before = rule.replace("self.", "oldSelf.value().");
    format!("{rule} || (oldSelf.hasValue() && !{before})")
}

/// One of these limits must let an update do something, unless there are no Pods, or both were zero before: the API server
/// holds this against the scale subresource too, and nobody who scales from 0 there can mend the limits.
fn room(max_unavailable: &str, max_surge: &str) -> Value {
    let limits = format!(
        "[self.?{max_unavailable}.orValue(1), self.?{max_surge}.orValue(0)].exists(limit, limit != 0 && limit != '0%')"
    );
    let rule = format!("self.?replicas.orValue(1) == 0 || {}", unless_before(&limits));
    says_unless_stored(&rule, NO_ROOM, INVALID)
}

/// A number of Pods, or a percentage without fractions, which OpenKruise would take for 0.
fn whole_percentage() -> Value {
    tells(
        "type(self) == int ? self >= 0 && self <= 2147483647 : self.matches('^[0-9]{1,9}%$')",
        "'it is %s; give a number of Pods, 0 or greater, or a percentage such as 20%% without fraction'\
         .format([self])",
        "give a number of Pods, 0 or greater, or a percentage such as 20% without fraction",
    )
}

fn percentage() -> Value {
    tells(
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

fn empty() -> Value {
    json!({ "default": {} })
}

fn number_of_nodes() -> Value {
    tells(
        "type(self) == int ? self >= 0 && self <= 2147483647 : self.matches('^[0-9]{1,9}$')",
        "'it is %s; give a number of nodes, 0 or greater (0 pauses the pulls); percentages are not supported'\
         .format([self])",
        "give a number of nodes, 0 or greater; percentages are not supported",
    )
}

fn one_order() -> Value {
    says(
        "size(self.?orderPriority.orValue([])) == 0 || size(self.?weightPriority.orValue([])) == 0",
        "orderPriority and weightPriority exclude each other; remove one of them",
        FORBIDDEN,
    )
}

/// Each term is held against each Pod, whenever these are put in order. And the API server accepts a rule for the
/// terms of a list only where their number has a bound.
fn few_terms() -> Value {
    json!({ "maxItems": 256 })
}

fn label_key() -> Value {
    json!({ "minLength": 1, "maxLength": LONGEST_KEY })
}

fn some_labels() -> Value {
    says(
        "size(self.?matchLabels.orValue({})) + size(self.?matchExpressions.orValue([])) > 0",
        "an empty selector matches every Pod; give matchLabels or matchExpressions",
        INVALID,
    )
}

fn operators() -> Value {
    json!({ "enum": ["In", "NotIn", "Exists", "DoesNotExist"] })
}

/// The API server would refuse the Pods that are to have them.
fn finalizer() -> Value {
    let mut keywords = tells(
        "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$')",
        "'it is %s; Pods take only finalizers of the form DOMAIN/NAME'.format([self])",
        "Pods take only finalizers of the form DOMAIN/NAME",
    );
    set(&mut keywords, &["maxLength"], json!(LONGEST_KEY));
    keywords
}

/// The API server accepts a rule for the items of a list only where their number has a bound.
fn few_finalizers() -> Value {
    json!({ "maxItems": 64 })
}

/// Rules for both versions.
pub(crate) const BOTH: &[Rule] = &[
    Rule {
        path: "spec.replicas",
        add: || json!({ "minimum": 0, "default": 1 }),
    },
    Rule {
        path: "spec.revisionHistoryLimit",
        add: || json!({ "minimum": 0, "default": 10 }),
    },
    Rule {
        path: "spec.minReadySeconds",
        add: || json!({ "minimum": 0, "default": 0 }),
    },
    Rule {
        path: "spec.progressDeadlineSeconds",
        add: not_negative,
    },
    Rule {
        path: "spec",
        add: || {
            json!({ "x-kubernetes-validations": [{
                "rule": unless_before(
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
    Rule {
        path: "spec.selector",
        add: || {
            says(
                "self == oldSelf",
                "spec.selector cannot be changed, or Pods would be left behind; create another CloneSet instead",
                FORBIDDEN,
            )
        },
    },
    Rule {
        path: "spec.selector",
        add: some_labels,
    },
    Rule {
        path: "spec.selector.matchExpressions.[].operator",
        add: operators,
    },
    Rule {
        path: "spec.template.spec.restartPolicy",
        add: || json!({ "enum": ["", "Always"] }),
    },
    Rule {
        path: "spec.template.spec",
        add: || {
            says(
                "!has(self.activeDeadlineSeconds)",
                "activeDeadlineSeconds would end Pods that are to run for ever; remove it",
                FORBIDDEN,
            )
        },
    },
    Rule {
        path: "spec.scaleStrategy.podsToDelete",
        add: || json!({ "x-kubernetes-list-type": "set", "maxItems": 10_000 }),
    },
    Rule {
        path: "spec.scaleStrategy.podsToDelete.[]",
        add: name,
    },
    Rule {
        path: "spec.scaleStrategy.maxUnavailable",
        add: whole_percentage,
    },
    Rule {
        path: "spec.lifecycle.preDelete.finalizersHandler",
        add: few_finalizers,
    },
    Rule {
        path: "spec.lifecycle.preDelete.finalizersHandler.[]",
        add: finalizer,
    },
    Rule {
        path: "spec.lifecycle.inPlaceUpdate.finalizersHandler",
        add: few_finalizers,
    },
    Rule {
        path: "spec.lifecycle.inPlaceUpdate.finalizersHandler.[]",
        add: finalizer,
    },
    Rule {
        path: "spec.lifecycle.preNormal.finalizersHandler",
        add: few_finalizers,
    },
    Rule {
        path: "spec.lifecycle.preNormal.finalizersHandler.[]",
        add: finalizer,
    },
    Rule {
        path: "spec.updateStrategy",
        add: empty,
    },
];

/// Rules of v1beta1.
pub(crate) const V1BETA1: &[Rule] = &[
    Rule {
        path: "spec.scaleStrategy.enablePVCReuse",
        add: || json!({ "default": false }),
    },
    Rule {
        path: "spec.updateStrategy.type",
        add: || json!({ "enum": ["", "OnDelete", "RollingUpdate"], "default": "RollingUpdate" }),
    },
    Rule {
        path: "spec.updateStrategy.rollingUpdate",
        add: empty,
    },
    Rule {
        path: "spec.updateStrategy.rollingUpdate.podUpdatePolicy",
        add: || json!({ "enum": ["", "ReCreate", "InPlaceIfPossible", "InPlaceOnly"], "default": "ReCreate" }),
    },
    Rule {
        path: "spec",
        add: || {
            room(
                "updateStrategy.?rollingUpdate.?maxUnavailable",
                "updateStrategy.?rollingUpdate.?maxSurge",
            )
        },
    },
    Rule {
        path: "spec.updateStrategy.rollingUpdate",
        add: || {
            says(
                "self.?podUpdatePolicy.orValue('') != 'InPlaceOnly' || self.?maxSurge.orValue(0) == 0 \
                 || self.maxSurge == '0%'",
                NO_SURGE,
                FORBIDDEN,
            )
        },
    },
];

/// Rules of v1alpha1.
pub(crate) const V1ALPHA1: &[Rule] = &[
    Rule {
        path: "spec.updateStrategy.type",
        add: || {
            json!({
                "enum": ["", "ReCreate", "InPlaceIfPossible", "InPlaceOnly", "OnDelete"],
                "default": "ReCreate",
            })
        },
    },
    Rule {
        path: "spec",
        add: || room("updateStrategy.?maxUnavailable", "updateStrategy.?maxSurge"),
    },
    Rule {
        path: "spec.updateStrategy",
        add: || {
            says(
                "self.?type.orValue('') != 'InPlaceOnly' || self.?maxSurge.orValue(0) == 0 || self.maxSurge == '0%'",
                NO_SURGE,
                FORBIDDEN,
            )
        },
    },
];

/// Rules of the limits of an update, wherever these stand.
pub(crate) const LIMITS: &[Rule] = &[
    Rule {
        path: "partition",
        add: partition,
    },
    Rule {
        path: "maxUnavailable",
        add: max_unavailable,
    },
    Rule {
        path: "maxSurge",
        add: max_surge,
    },
    Rule {
        path: "priorityStrategy",
        add: one_order,
    },
    Rule {
        path: "priorityStrategy.weightPriority",
        add: few_terms,
    },
    Rule {
        path: "priorityStrategy.orderPriority",
        add: few_terms,
    },
    Rule {
        path: "priorityStrategy.orderPriority.[].orderedKey",
        add: label_key,
    },
    Rule {
        path: "priorityStrategy.weightPriority.[].weight",
        add: || json!({ "minimum": 0, "maximum": 100 }),
    },
    Rule {
        path: "priorityStrategy.weightPriority.[].matchSelector",
        add: some_labels,
    },
    Rule {
        path: "priorityStrategy.weightPriority.[].matchSelector.matchExpressions.[].operator",
        add: operators,
    },
    Rule {
        path: "scatterStrategy",
        add: || json!({ "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["key", "value"] }),
    },
    Rule {
        path: "scatterStrategy",
        add: few_terms,
    },
    Rule {
        path: "scatterStrategy.[].key",
        add: label_key,
    },
    Rule {
        path: "scatterStrategy.[].value",
        add: || json!({ "maxLength": LONGEST_LABEL }),
    },
    Rule {
        path: "inPlaceUpdateStrategy.gracePeriodSeconds",
        add: not_negative,
    },
    Rule {
        path: "inPlaceUpdateStrategy.imagePreDownloadParallelism",
        add: number_of_nodes,
    },
    Rule {
        path: "inPlaceUpdateStrategy.imagePreDownloadTimeoutSeconds",
        add: not_negative,
    },
    Rule {
        path: "inPlaceUpdateStrategy.imagePreDownloadMinUpdatedReadyPods",
        add: not_negative,
    },
];
