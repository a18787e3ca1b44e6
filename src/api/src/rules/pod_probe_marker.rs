//! Checks of PodProbeMarker.

use serde_json::{Value, json};

use super::{FORBIDDEN, INVALID, SchemaRule, cel, not_negative};
use crate::pod_probe_marker::{MAX_MARKS, MAX_PROBES, RESERVED_CONDITION_TYPES};
use crate::schemas::MAX_KEY_CHARS;

/// A key of a label or annotation, and the name of a condition's type.
const QUALIFIED_NAME: &str = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

fn marks() -> Value {
    let mut marks = cel(
        &format!("self.all(key, size(key) <= {MAX_KEY_CHARS} && key.matches('{QUALIFIED_NAME}'))"),
        "a key is no valid key of a label or annotation",
        INVALID,
    );
    crate::json::set(&mut marks, &["maxProperties"], json!(MAX_MARKS));
    marks
}

fn port() -> Value {
    cel(
        "type(self) == int ? self >= 1 && self <= 65535 : self.matches('^([0-9]{1,5}|[a-z0-9-]{1,15})$')",
        "port must be a number from 1 to 65535, or the name of a port of the container",
        INVALID,
    )
}

fn no_host() -> Value {
    json!({ "maxLength": 0 })
}

/// Rules of PodProbeMarker.
pub(crate) const RULES: &[SchemaRule] = &[
    SchemaRule {
        path: "status",
        add: || json!({ "required": ["observedGeneration"] }),
    },
    SchemaRule {
        path: "spec.selector",
        add: || {
            cel(
                "size(self.?matchLabels.orValue({})) + size(self.?matchExpressions.orValue([])) > 0",
                "spec.selector is empty; give at least one label",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.selector",
        add: || cel("self == oldSelf", "spec.selector cannot be changed", FORBIDDEN),
    },
    SchemaRule {
        path: "spec.probes",
        add: || json!({ "minItems": 1, "maxItems": MAX_PROBES }),
    },
    SchemaRule {
        path: "spec.probes",
        add: || {
            cel(
                "self.all(p, self.exists_one(q, q.name == p.name))",
                "two probes have the same name",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.probes",
        add: || {
            cel(
                "self.all(p, p.?podConditionType.orValue('') == '' || \
                 self.exists_one(q, q.?podConditionType.orValue('') == p.podConditionType))",
                "two probes have the same podConditionType",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.probes.[]",
        add: || {
            cel(
                "self.?podConditionType.orValue('') != '' || size(self.?markerPolicy.orValue([])) > 0",
                "a probe needs a podConditionType or a markerPolicy",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.probes.[].name",
        add: || json!({ "minLength": 1, "maxLength": 253, "pattern": "^[^#]+$" }),
    },
    SchemaRule {
        path: "spec.probes.[].containerName",
        add: || json!({ "minLength": 1, "maxLength": 63 }),
    },
    SchemaRule {
        path: "spec.probes.[].podConditionType",
        add: || json!({ "maxLength": 316, "pattern": format!("^$|{QUALIFIED_NAME}") }),
    },
    SchemaRule {
        path: "spec.probes.[].podConditionType",
        add: || {
            cel(
                &format!(
                    "!(self in {})",
                    json!(RESERVED_CONDITION_TYPES).to_string().replace('"', "'")
                ),
                "podConditionType is one of Kubernetes or of a workload; give a type of your own",
                FORBIDDEN,
            )
        },
    },
    SchemaRule {
        path: "spec.probes.[].probe",
        add: || {
            cel(
                "(has(self.exec) ? 1 : 0) + (has(self.httpGet) ? 1 : 0) + (has(self.tcpSocket) ? 1 : 0) \
                 + (has(self.grpc) ? 1 : 0) == 1",
                "a probe must have exactly one of exec, httpGet, tcpSocket and grpc",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.probes.[].probe.exec",
        add: || {
            cel(
                "size(self.?command.orValue([])) > 0",
                "exec has no command",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.probes.[].probe.httpGet.host",
        add: no_host,
    },
    SchemaRule {
        path: "spec.probes.[].probe.httpGet.port",
        add: port,
    },
    SchemaRule {
        path: "spec.probes.[].probe.httpGet.scheme",
        add: || json!({ "enum": ["", "HTTP", "HTTPS"] }),
    },
    SchemaRule {
        path: "spec.probes.[].probe.tcpSocket.host",
        add: no_host,
    },
    SchemaRule {
        path: "spec.probes.[].probe.tcpSocket.port",
        add: port,
    },
    SchemaRule {
        path: "spec.probes.[].probe.grpc.service",
        add: || json!({ "default": "" }),
    },
    SchemaRule {
        path: "spec.probes.[].probe.grpc.port",
        add: || json!({ "minimum": 1, "maximum": 65_535 }),
    },
    SchemaRule {
        path: "spec.probes.[].probe.initialDelaySeconds",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.probes.[].probe.periodSeconds",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.probes.[].probe.timeoutSeconds",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.probes.[].probe.successThreshold",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.probes.[].probe.failureThreshold",
        add: not_negative,
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy",
        add: || json!({ "maxItems": 2 }),
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy",
        add: || {
            cel(
                "self.all(p, self.exists_one(q, q.state == p.state))",
                "two policies have the same state",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy.[]",
        add: || {
            cel(
                "size(self.?labels.orValue({})) + size(self.?annotations.orValue({})) > 0",
                "a policy has neither labels nor annotations",
                INVALID,
            )
        },
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy.[].state",
        add: || json!({ "enum": ["Succeeded", "Failed"] }),
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy.[].labels",
        add: marks,
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy.[].labels.{}",
        add: || json!({ "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$" }),
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy.[].annotations",
        add: marks,
    },
    SchemaRule {
        path: "spec.probes.[].markerPolicy.[].annotations.{}",
        add: || json!({ "maxLength": 4096 }),
    },
];
