//! Checks of ContainerRecreateJob.

use serde_json::{Value, json};

use super::cloneset::{non_empty_selector, operators, percentage};
use super::{
    FORBIDDEN, INVALID, SchemaRule, cel, cel_with_expression, container_name, not_negative, object_name,
    seconds,
};
use crate::container_recreate_job::{MAX_CONTAINERS, MAX_FAILED_PODS};

fn unchanged() -> Value {
    cel(
        "self == oldSelf",
        "this field of a ContainerRecreateJob cannot be changed; create another job instead",
        FORBIDDEN,
    )
}

/// Rules of ContainerRecreateJob.
pub(crate) const RULES: &[SchemaRule] = &[
    SchemaRule {
        path: "spec",
        add: || {
            cel(
                "has(self.selector) != has(self.targetRef)",
                "give spec.selector or spec.targetRef, and not both",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec",
        add: || {
            cel(
                "has(self.selector) == has(oldSelf.selector) && has(self.strategy) == has(oldSelf.strategy)",
                "spec.selector, spec.targetRef and spec.strategy of a ContainerRecreateJob cannot be added or removed; \
                 create another job instead",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.selector",
        add: non_empty_selector,
    },
    SchemaRule {
        path: "spec.selector",
        add: unchanged,
    },
    SchemaRule {
        path: "spec.selector.matchExpressions.[].operator",
        add: operators,
    },
    SchemaRule {
        path: "spec.targetRef",
        add: || {
            cel(
                "self.kind == 'CloneSet' \
                 ? self.apiVersion in ['apps.kruise.io/v1beta1', 'apps.kruise.io/v1alpha1'] \
                 : self.apiVersion == 'apps/v1'",
                "apiVersion must be apps/v1, or that of CloneSet, apps.kruise.io/v1beta1",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.targetRef",
        add: unchanged,
    },
    SchemaRule {
        path: "spec.targetRef.apiVersion",
        add: || json!({ "maxLength": 64 }),
    },
    SchemaRule {
        path: "spec.targetRef.kind",
        add: || json!({ "enum": ["CloneSet", "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet"] }),
    },
    SchemaRule {
        path: "spec.targetRef.name",
        add: object_name,
    },
    SchemaRule {
        path: "spec.containers",
        add: || {
            json!({ "minItems": 1, "maxItems": MAX_CONTAINERS, "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"] })
        },
    },
    SchemaRule {
        path: "spec.containers",
        add: unchanged,
    },
    SchemaRule {
        path: "spec.containers.[].name",
        add: container_name,
    },
    SchemaRule {
        path: "spec.strategy",
        add: unchanged,
    },
    SchemaRule {
        path: "spec.strategy.terminationGracePeriodSeconds",
        add: seconds,
    },
    SchemaRule {
        path: "spec.strategy.unreadyGracePeriodSeconds",
        add: seconds,
    },
    SchemaRule {
        path: "spec.maxUnavailable",
        add: || {
            cel_with_expression(
                "type(self) == int ? self >= 1 && self <= 2147483647 : self.matches('^([1-9][0-9]?|100)%$')",
                "'it is %s; give a number of Pods, 1 or greater, or a percentage such as 20%%'.format([self])",
                "give a number of Pods, 1 or greater, or a percentage such as 20%",
            )
        },
    },
    SchemaRule {
        path: "spec.partition",
        add: percentage,
    },
    SchemaRule {
        path: "spec.maxFailures",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.podDeadlineSeconds",
        add: || json!({ "minimum": 3 }),
    },
    SchemaRule {
        path: "spec.activeDeadlineSeconds",
        add: || json!({ "minimum": 1, "maximum": i32::MAX }),
    },
    SchemaRule {
        path: "spec.ttlSecondsAfterFinished",
        add: not_negative,
    },
    SchemaRule {
        path: "status.failedPods",
        add: || json!({ "maxItems": MAX_FAILED_PODS }),
    },
];
