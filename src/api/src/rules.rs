//! Checks of the API server itself, for both versions of each kind: limits and CEL rules by path.
//!
//! A limit's own error names field and value. A CEL rule names them in its message. Everything here is a check that
//! admission made before; objects that were stored without it can still be updated, because the API server applies a
//! failing check only to what an update changes.

use serde_json::{Value, json};

use super::image_list_pull_job::MAX_IMAGES;
use super::node_image::{
    MAX_CONDITION_MESSAGE_CHARS, MAX_CONDITIONS, MAX_IMAGE_NAME_CHARS, MAX_PIN_SECONDS, MAX_SANDBOX_ENTRIES,
    MAX_SANDBOX_VALUE_CHARS, MAX_TAGS,
};
use super::{names, schedule, schemas};

pub(super) mod cloneset;
pub(super) mod container_recreate_job;
pub(super) mod pod_probe_marker;
pub(super) mod sidecarset;

/// One addition to the schema at `path`.
pub(super) struct SchemaRule {
    /// Dotted path from the root; `[]` is a list's item, `{}` a map's value.
    pub path: &'static str,
    /// Keywords to add. Lists are appended to existing ones.
    pub add: fn() -> Value,
}

/// Rules whose paths are relative to `path`; to the root if that is empty.
pub(super) type RulesAtPath = (&'static str, &'static [SchemaRule]);

/// A CEL rule with a constant message.
fn cel(rule: &str, message: &str, reason: &str) -> Value {
    json!({ "x-kubernetes-validations": [{ "rule": rule, "message": message, "reason": reason }] })
}

/// A CEL rule that also reads the previous value, `oldSelf`, an optional, to accept a stored one.
fn cel_unless_stored(rule: &str, message: &str, reason: &str) -> Value {
    json!({ "x-kubernetes-validations": [
        { "rule": rule, "message": message, "reason": reason, "optionalOldSelf": true }
    ] })
}

/// A CEL rule whose message is an expression, to include the value.
fn cel_with_expression(rule: &str, message_expression: &str, message: &str) -> Value {
    json!({ "x-kubernetes-validations": [{
        "rule": rule,
        "messageExpression": message_expression,
        "message": message,
        "reason": "FieldValueInvalid"
    }] })
}

/// The longest enum value, or time, in characters.
const MAX_WORD_CHARS: usize = 64;

const INVALID: &str = "FieldValueInvalid";
const FORBIDDEN: &str = "FieldValueForbidden";

fn not_negative() -> Value {
    json!({ "minimum": 0 })
}

fn positive() -> Value {
    json!({ "minimum": 1 })
}

/// The name of an object, such as a Pod.
pub(super) fn object_name() -> Value {
    json!({ "minLength": 1, "maxLength": names::MAX_SUBDOMAIN_LENGTH, "pattern": names::SUBDOMAIN_PATTERN })
}

/// The same, but an empty name is allowed and means absent.
fn object_name_or_empty() -> Value {
    json!({ "maxLength": names::MAX_SUBDOMAIN_LENGTH, "pattern": format!("^$|{}", names::SUBDOMAIN_PATTERN) })
}

/// Seconds as `int64`, limited to `int32`, 68 years, so that times can be computed with them. A Pod's own
/// `activeDeadlineSeconds` has the same limit.
fn seconds() -> Value {
    json!({ "minimum": 0, "maximum": i32::MAX })
}

/// Labels and annotations that the manager copies to each node that the job selects.
fn sandbox_map() -> Value {
    json!({
        "maxProperties": MAX_SANDBOX_ENTRIES,
        "x-kubernetes-validations": schemas::short_keys(),
    })
}

fn sandbox_value() -> Value {
    json!({ "maxLength": MAX_SANDBOX_VALUE_CHARS })
}

fn word() -> Value {
    json!({ "maxLength": MAX_WORD_CHARS })
}

/// The ID of a container, as `RUNTIME://ID`; an ID has 64 characters.
fn container_name() -> Value {
    json!({ "minLength": 1, "maxLength": 63, "pattern": names::LABEL_PATTERN })
}

fn container_id() -> Value {
    json!({ "maxLength": 1024 })
}

fn pin_seconds() -> Value {
    json!({ "minimum": 1, "maximum": MAX_PIN_SECONDS })
}

fn pull_policy() -> Value {
    json!({ "enum": ["Always", "IfNotPresent"] })
}

/// Rules of NodeImage.
pub(super) const NODE_IMAGE: &[SchemaRule] = &[
    SchemaRule {
        path: "spec.images",
        add: || json!({ "maxProperties": 256 }),
    },
    SchemaRule {
        path: "spec.images",
        add: || {
            cel_unless_stored(
                "!('' in self) || (oldSelf.hasValue() && '' in oldSelf.value())",
                "an image in spec.images has an empty name; give it a name",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.images",
        add: || {
            cel_unless_stored(
                &format!(
                    "self.all(name, size(name) <= {MAX_IMAGE_NAME_CHARS} || (oldSelf.hasValue() && name in oldSelf.value()))"
                ),
                &format!("the name of an image may not be longer than {MAX_IMAGE_NAME_CHARS} characters"),
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.images.{}.sandboxConfig.labels",
        add: sandbox_map,
    },
    SchemaRule {
        path: "spec.images.{}.sandboxConfig.labels.{}",
        add: sandbox_value,
    },
    SchemaRule {
        path: "spec.images.{}.sandboxConfig.annotations",
        add: sandbox_map,
    },
    SchemaRule {
        path: "spec.images.{}.sandboxConfig.annotations.{}",
        add: sandbox_value,
    },
    // An object of 1.5 MiB has room for about as many.
    SchemaRule {
        path: "spec.images.{}.pullSecrets",
        add: || json!({ "maxItems": 10_000 }),
    },
    SchemaRule {
        path: "spec.images.{}.pullSecrets.[].name",
        add: object_name_or_empty,
    },
    SchemaRule {
        path: "spec.images.{}.pullSecrets.[].namespace",
        add: object_name_or_empty,
    },
    // The manager writes a few of each namespace; an object of 1.5 MiB has room for about as many.
    SchemaRule {
        path: "spec.images.{}.serviceAccounts",
        add: || json!({ "maxItems": 10_000 }),
    },
    SchemaRule {
        path: "spec.images.{}.serviceAccounts.[].name",
        add: object_name,
    },
    SchemaRule {
        path: "spec.images.{}.serviceAccounts.[].namespace",
        add: object_name,
    },
    SchemaRule {
        path: "spec.images.{}.tags",
        add: || json!({ "maxItems": MAX_TAGS }),
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].createdAt",
        add: || json!({ "maxLength": MAX_WORD_CHARS }),
    },
    // A tag has at most 128 characters, a digest 135.
    SchemaRule {
        path: "spec.images.{}.tags.[].tag",
        add: || json!({ "minLength": 1, "maxLength": 256 }),
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].version",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].imagePullPolicy",
        add: pull_policy,
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].pullPolicy.timeoutSeconds",
        add: positive,
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].pullPolicy.backoffLimit",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].pullPolicy.pinSeconds",
        add: pin_seconds,
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].pullPolicy.ttlSecondsAfterFinished",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.images.{}.tags.[].pullPolicy.activeDeadlineSeconds",
        add: seconds,
    },
    SchemaRule {
        path: "status.conditions",
        add: || json!({ "maxItems": MAX_CONDITIONS }),
    },
    SchemaRule {
        path: "status.conditions.[].message",
        add: || json!({ "maxLength": MAX_CONDITION_MESSAGE_CHARS }),
    },
];

/// Rules of NodePodProbe: its probes and their states are bounded, so that nodes can read them. A message is cut by the
/// daemon.
pub(super) const NODE_POD_PROBE: &[SchemaRule] = &[
    // Without an address, OpenKruise's manager writes an empty one.
    SchemaRule {
        path: "spec.podProbes.[]",
        add: || json!({ "required": ["IP", "name", "namespace", "uid"] }),
    },
    SchemaRule {
        path: "spec.podProbes.[].IP",
        add: word,
    },
    SchemaRule {
        path: "spec.podProbes.[].name",
        add: object_name_or_empty,
    },
    SchemaRule {
        path: "spec.podProbes.[].namespace",
        add: object_name_or_empty,
    },
    SchemaRule {
        path: "spec.podProbes.[].uid",
        add: word,
    },
    // MARKER#PROBE.
    SchemaRule {
        path: "spec.podProbes.[].probes.[].name",
        add: || json!({ "maxLength": 1024 }),
    },
    SchemaRule {
        path: "spec.podProbes.[].probes.[].containerName",
        add: word,
    },
    SchemaRule {
        path: "spec.podProbes.[].probes.[].probe.grpc.service",
        add: || json!({ "default": "" }),
    },
    SchemaRule {
        path: "spec.podProbes",
        add: || json!({ "maxItems": MAX_PROBED_PODS }),
    },
    SchemaRule {
        path: "spec.podProbes.[].probes",
        add: || json!({ "maxItems": MAX_ENTRIES_OF_POD }),
    },
    SchemaRule {
        path: "status.podProbeStatuses",
        add: || json!({ "maxItems": MAX_PROBED_PODS }),
    },
    SchemaRule {
        path: "status.podProbeStatuses.[].probeStates.[].containerID",
        add: container_id,
    },
    SchemaRule {
        path: "status.podProbeStatuses.[].probeStates",
        add: || json!({ "maxItems": MAX_ENTRIES_OF_POD }),
    },
];

/// Pods with probes on a node; kubelet runs 110 by default.
const MAX_PROBED_PODS: usize = 5000;
/// Probes of a Pod in a NodePodProbe, in which OpenKruise has no limit.
const MAX_ENTRIES_OF_POD: usize = 1000;

/// An image reference: a name has at most 255 characters, a tag 128, a digest 135.
fn image_reference() -> Value {
    json!({ "minLength": 1, "maxLength": 1024 })
}

/// Rules of ImagePullJob alone.
pub(super) const IMAGE_PULL_JOB: &[SchemaRule] = &[
    SchemaRule {
        path: "spec.image",
        add: image_reference,
    },
    SchemaRule {
        path: "spec",
        add: || {
            cel_with_expression(
                "(has(self.pullSecrets) ? self.pullSecrets : []) == \
                 (has(oldSelf.pullSecrets) ? oldSelf.pullSecrets : [])",
                "'spec.pullSecrets cannot be changed: it was %s and would be %s; create another job instead'\
                 .format([has(oldSelf.pullSecrets) ? oldSelf.pullSecrets : [], \
                 has(self.pullSecrets) ? self.pullSecrets : []])",
                "spec.pullSecrets cannot be changed; create another job instead",
            )
        },
    },
    SchemaRule {
        path: "spec",
        add: || {
            cel(
                "(has(self.serviceAccountName) ? self.serviceAccountName : '') == \
                 (has(oldSelf.serviceAccountName) ? oldSelf.serviceAccountName : '')",
                "spec.serviceAccountName cannot be changed; create another job instead",
                INVALID,
            )
        },
    },
];

/// Rules of ImageListPullJob alone.
pub(super) const IMAGE_LIST_PULL_JOB: &[SchemaRule] = &[
    SchemaRule {
        path: "spec.images",
        add: || json!({ "minItems": 1, "maxItems": MAX_IMAGES, "x-kubernetes-list-type": "set" }),
    },
    SchemaRule {
        path: "spec.images.[]",
        add: image_reference,
    },
];

/// Rules of what ImagePullJob and ImageListPullJob have in common.
pub(super) const IMAGE_PULL_JOB_TEMPLATE: &[SchemaRule] = &[
    SchemaRule {
        path: "spec",
        add: || {
            cel_unless_stored(
                "!(has(self.selector) && has(self.podSelector)) || (oldSelf.hasValue() \
                 && has(oldSelf.value().selector) && has(oldSelf.value().podSelector))",
                "spec.selector and spec.podSelector exclude each other; remove one of them",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.selector.names",
        add: || json!({ "x-kubernetes-list-type": "set" }),
    },
    SchemaRule {
        path: "spec.selector.names.[]",
        add: object_name,
    },
    SchemaRule {
        path: "spec.sandboxConfig.labels",
        add: sandbox_map,
    },
    SchemaRule {
        path: "spec.sandboxConfig.labels.{}",
        add: sandbox_value,
    },
    SchemaRule {
        path: "spec.sandboxConfig.annotations",
        add: sandbox_map,
    },
    SchemaRule {
        path: "spec.sandboxConfig.annotations.{}",
        add: sandbox_value,
    },
    SchemaRule {
        path: "spec.selector",
        add: || {
            cel(
                "size(self.?names.orValue([])) == 0 || (size(self.?matchLabels.orValue({})) == 0 \
                 && size(self.?matchExpressions.orValue([])) == 0)",
                "spec.selector.names excludes matchLabels and matchExpressions; \
                 select nodes either by name or by label",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.parallelism",
        add: || {
            cel_with_expression(
                "type(self) == int ? self >= 0 && self <= 2147483647 : self.matches('^([0-9]{1,9}|(100|[0-9]{1,2})%)$')",
                "'spec.parallelism is %s; give a number of nodes, 0 or greater, or a percentage from 0%% to 100%% \
                 (0 pauses the job)'.format([self])",
                "spec.parallelism must be a number of nodes, 0 or greater, or a percentage from 0% to 100%",
            )
        },
    },
    // Limits make the rule of ImagePullJob cheap enough for the API server to accept it.
    SchemaRule {
        path: "spec.pullSecrets",
        add: || json!({ "maxItems": 64 }),
    },
    SchemaRule {
        path: "spec.pullSecrets.[]",
        add: object_name,
    },
    SchemaRule {
        path: "spec.serviceAccountName",
        add: object_name,
    },
    SchemaRule {
        path: "spec.imagePullPolicy",
        add: pull_policy,
    },
    SchemaRule {
        path: "spec.pullPolicy.timeoutSeconds",
        add: positive,
    },
    SchemaRule {
        path: "spec.pullPolicy.backoffLimit",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.pullPolicy.pinSeconds",
        add: pin_seconds,
    },
    SchemaRule {
        path: "spec.completionPolicy.type",
        add: || json!({ "enum": ["Always", "Never"] }),
    },
    SchemaRule {
        path: "spec.completionPolicy",
        add: || json!({ "default": {} }),
    },
    SchemaRule {
        path: "spec.completionPolicy.activeDeadlineSeconds",
        add: || json!({ "minimum": 1, "maximum": i32::MAX }),
    },
    SchemaRule {
        path: "spec.completionPolicy.ttlSecondsAfterFinished",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.completionPolicy",
        add: || {
            cel(
                "self.?type.orValue('Always') != 'Never' || \
                 !(has(self.activeDeadlineSeconds) || has(self.ttlSecondsAfterFinished))",
                "spec.completionPolicy.type is Never, so the job never ends: \
                 remove activeDeadlineSeconds and ttlSecondsAfterFinished",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.schedule",
        add: || json!({ "maxLength": schedule::MAX_LENGTH, "pattern": schedule::PATTERN }),
    },
    SchemaRule {
        path: "spec",
        add: || {
            cel(
                "!has(self.schedule) || self.completionPolicy.?type.orValue('Always') == 'Never'",
                "spec.schedule needs spec.completionPolicy.type Never: a job of another type ends",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec",
        add: || {
            cel_with_expression(
                "!has(self.completionPolicy.activeDeadlineSeconds) || !has(self.pullPolicy) \
                 || !has(self.pullPolicy.timeoutSeconds) \
                 || self.completionPolicy.activeDeadlineSeconds >= self.pullPolicy.timeoutSeconds",
                "'spec.completionPolicy.activeDeadlineSeconds is %d, less than \
                 spec.pullPolicy.timeoutSeconds, which is %d; raise the deadline or lower the timeout'\
                 .format([self.completionPolicy.activeDeadlineSeconds, self.pullPolicy.timeoutSeconds])",
                "spec.completionPolicy.activeDeadlineSeconds is less than spec.pullPolicy.timeoutSeconds",
            )
        },
    },
];

/// Rules of ContainerRecreateRequest.
pub(super) const CONTAINER_RECREATE_REQUEST: &[SchemaRule] = &[
    SchemaRule {
        path: "spec",
        add: || {
            cel(
                "self == oldSelf",
                "spec of a ContainerRecreateRequest cannot be changed; create another request instead",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.podName",
        add: object_name,
    },
    SchemaRule {
        path: "spec.containers",
        add: || json!({ "minItems": 1, "maxItems": 256 }),
    },
    SchemaRule {
        path: "spec.containers.[].statusContext.containerID",
        add: container_id,
    },
    SchemaRule {
        path: "spec.containers.[].name",
        add: container_name,
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
        path: "spec.activeDeadlineSeconds",
        add: || json!({ "minimum": 3, "maximum": i32::MAX }),
    },
];
