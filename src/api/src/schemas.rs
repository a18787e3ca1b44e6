//! Schemas of embedded Kubernetes types, as CRDs need them: with list types, and only the intended fields.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::json::set;

pub(super) mod sidecarset;

/// The longest string of an `intstr.IntOrString`, in characters. Percentages and names of ports are far shorter.
pub const MAX_INT_OR_STRING_CHARS: usize = 64;
/// Names of nodes in one selector. This and the next ones limit memory: each string takes some 32 bytes, however short
/// it is, and an object of 1.5 MiB has room for half a million.
const MAX_NODE_NAMES: usize = 20_000;
/// Labels in one selector.
const MAX_LABELS: usize = 256;
/// Labels, or requirements, in one selector of Pods that get a weight: a strategy has many of them.
const MAX_WEIGHT_REQUIREMENTS: usize = 16;
/// Requirements in one selector.
const MAX_REQUIREMENTS: usize = 64;
/// Values in one requirement.
const MAX_VALUES: usize = 500;
/// The longest key of a label or an annotation, in characters: a prefix of 253, a slash, and a name of 63.
pub const MAX_KEY_CHARS: usize = 317;
/// The longest value of a label, in characters.
pub const MAX_LABEL_CHARS: usize = 63;
/// Labels of one hook; a Pod has few.
const MAX_HOOK_LABELS: usize = 64;
/// Claim templates of a CloneSet. A node attaches fewer volumes for all of its Pods.
const MAX_CLAIM_TEMPLATES: usize = 100;
/// References of one tag: an object of 1.5 MiB has room for about as many.
const MAX_REFERENCES: usize = 10_000;
/// The longest part of a reference to an object, in characters. Names have 253.
const MAX_REFERENCE_CHARS: usize = 1024;
/// Ports of one container: as many as exist.
const MAX_PORTS: usize = 65_536;
/// Arguments, or headers, of one hook. A daemon reads 64 KiB of a Pod's hooks, which have room for about as many.
const MAX_HOOK_ITEMS: usize = 20_000;
/// The longest string in a hook, in characters.
const MAX_HOOK_CHARS: usize = 64 << 10;

/// An integer or a string, as `intstr.IntOrString`.
pub(super) fn int_or_string(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-int-or-string": true, "maxLength": MAX_INT_OR_STRING_CHARS })
}

/// Rule for the keys of labels and annotations: the schema of a map cannot restrict its keys.
pub(super) fn short_keys() -> Value {
    json!([{
        "rule": format!("self.all(key, size(key) <= {MAX_KEY_CHARS})"),
        "message":
            format!("a key is longer than {MAX_KEY_CHARS} characters, the longest that a label or an annotation has"),
        "reason": "FieldValueInvalid",
    }])
}

fn string_schema(max_chars: usize, description: &str) -> Value {
    json!({ "type": "string", "maxLength": max_chars, "description": description })
}

fn labels_json(max: usize, description: &str) -> Value {
    json!({
        "type": "object",
        "maxProperties": max,
        "additionalProperties": { "type": "string", "maxLength": MAX_LABEL_CHARS },
        "x-kubernetes-validations": short_keys(),
        "description": description
    })
}

/// Labels that a hook sets on Pods.
pub(super) fn hook_labels(_: &mut SchemaGenerator) -> Schema {
    into_schema(labels_json(
        MAX_HOOK_LABELS,
        "Labels, each with exactly this value.",
    ))
}

/// Any string.
pub(super) fn text(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string" })
}

/// Node selector: names, or labels.
pub(super) fn node_selector(_: &mut SchemaGenerator) -> Schema {
    let mut schema = label_selector_json("Which nodes pull the image; every node when absent.");
    let names = json!({
        "type": "array",
        "maxItems": MAX_NODE_NAMES,
        "items": { "type": "string" },
        "description": "Names of the nodes. Cannot be used together with labels."
    });
    set(&mut schema, &["properties", "names"], names);
    into_schema(schema)
}

/// Selector of Pods.
pub(super) fn pod_selector(_: &mut SchemaGenerator) -> Schema {
    into_schema(label_selector_json(
        "Pods in the job's namespace whose nodes pull the image. Excludes `selector`.",
    ))
}

/// Selector of the Pods that a workload owns.
pub(super) fn own_pods(_: &mut SchemaGenerator) -> Schema {
    into_schema(label_selector_json(
        "Label selector for the Pods; those of `template` must match. Cannot be changed.",
    ))
}

/// Selector of the Pods that are probed.
pub(super) fn probed_pods(_: &mut SchemaGenerator) -> Schema {
    into_schema(label_selector_json(
        "Label selector for the Pods of the namespace. Cannot be changed.",
    ))
}

/// Selector of the Pods whose containers are restarted.
pub(super) fn restarted_pods(_: &mut SchemaGenerator) -> Schema {
    into_schema(label_selector_json(
        "Label selector for the Pods of the namespace. Excludes `targetRef`. Cannot be changed.",
    ))
}

/// Selector of the Pods that get a weight.
pub(super) fn weighted_pods(_: &mut SchemaGenerator) -> Schema {
    let mut schema = label_selector_json("Which Pods the weight is given to.");
    let max = || json!(MAX_WEIGHT_REQUIREMENTS);
    set(
        &mut schema,
        &["properties", "matchLabels", "maxProperties"],
        max(),
    );
    set(
        &mut schema,
        &["properties", "matchExpressions", "maxItems"],
        max(),
    );
    into_schema(schema)
}

/// An embedded `core/v1.PodTemplateSpec`, of which the API server keeps every field. Only fields that rules use are
/// named.
pub(super) fn pod_template(_: &mut SchemaGenerator) -> Schema {
    let some = |properties: Value| json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": properties });
    into_schema(some(json!({
        "spec": some(json!({
            "restartPolicy": { "type": "string", "description": "Always." },
            "activeDeadlineSeconds": { "type": "integer", "format": "int64", "description": "Must be absent." },
        })),
    })))
}

/// A list of embedded `core/v1.PersistentVolumeClaim`, of which the API server keeps every field.
pub(super) fn claim_templates(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MAX_CLAIM_TEMPLATES,
        "x-kubernetes-preserve-unknown-fields": true,
        "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
    })
}

fn into_schema(value: Value) -> Schema {
    Schema::try_from(value).unwrap_or_default()
}

fn label_selector_json(description: &str) -> Value {
    json!({
        "type": "object",
        "description": description,
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": labels_json(MAX_LABELS, "Labels that must be there with these values."),
            "matchExpressions": {
                "type": "array",
                "maxItems": MAX_REQUIREMENTS,
                "x-kubernetes-list-type": "atomic",
                "description": "Requirements on labels; all must hold.",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": string_schema(MAX_KEY_CHARS, "The label's key."),
                        "operator": string_schema(MAX_LABEL_CHARS, "In, NotIn, Exists or DoesNotExist."),
                        "values": {
                            "type": "array",
                            "maxItems": MAX_VALUES,
                            "x-kubernetes-list-type": "atomic",
                            "items": { "type": "string", "maxLength": MAX_LABEL_CHARS },
                            "description": "Values for In and NotIn; empty for the other operators."
                        }
                    }
                }
            }
        }
    })
}

/// Reference to an object, as `core/v1.ObjectReference`.
pub(super) fn object_references(_: &mut SchemaGenerator) -> Schema {
    let text = |description: &str| string_schema(MAX_REFERENCE_CHARS, description);
    into_schema(json!({
        "type": "array",
        "maxItems": MAX_REFERENCES,
        "items": {
            "type": "object",
            "x-kubernetes-map-type": "atomic",
            "properties": {
                "apiVersion": text("API version of the object."),
                "kind": text("Kind of the object."),
                "namespace": text("Namespace of the object."),
                "name": text("Name of the object."),
                "uid": text("UID of the object."),
                "resourceVersion": text("Resource version the reference was made at."),
                "fieldPath": text("Field of the object that is referred to."),
            }
        }
    }))
}

/// Ports of a container, as `core/v1.ContainerPort`.
pub(super) fn container_ports(_: &mut SchemaGenerator) -> Schema {
    let number =
        |description: &str| json!({ "type": "integer", "format": "int32", "description": description });
    into_schema(json!({
        "type": "array",
        "maxItems": MAX_PORTS,
        "items": {
            "type": "object",
            "required": ["containerPort"],
            "properties": {
                "name": string_schema(MAX_LABEL_CHARS, "Name of the port, unique in its Pod."),
                "containerPort": number("Port on the Pod's address, 1 to 65535."),
                "hostPort": number("Port on the node, 1 to 65535."),
                "hostIP": string_schema(MAX_LABEL_CHARS, "Node address that the host port is bound to."),
                "protocol": {
                    "type": "string",
                    "maxLength": MAX_LABEL_CHARS,
                    "default": "TCP",
                    "description": "TCP, UDP or SCTP."
                }
            }
        }
    }))
}

/// A preStop hook, as `core/v1.LifecycleHandler`; `sleep` is an addition of ours.
pub(super) fn lifecycle_handler(generator: &mut SchemaGenerator) -> Schema {
    let port = int_or_string(generator).to_value();
    into_schema(json!({
        "type": "object",
        "properties": {
            "exec": exec_json(),
            "httpGet": http_get_json(&port),
            "tcpSocket": tcp_socket_json(&port, "Accepted for completeness; kubelet does not run such hooks."),
            "sleep": {
                "type": "object",
                "description": "Waits. Not part of OpenKruise.",
                "required": ["seconds"],
                "properties": {
                    "seconds": { "type": "integer", "format": "int64", "description": "How long, in seconds." }
                }
            }
        }
    }))
}

/// A probe, as `core/v1.Probe`. Limits are those of hooks; the daemon checks the rest.
pub(super) fn probe(generator: &mut SchemaGenerator) -> Schema {
    let port = int_or_string(generator).to_value();
    let seconds =
        |description: &str| json!({ "type": "integer", "format": "int32", "description": description });
    into_schema(json!({
        "type": "object",
        "properties": {
            "exec": exec_json(),
            "httpGet": http_get_json(&port),
            "tcpSocket": tcp_socket_json(&port, "Opens a TCP connection."),
            "grpc": {
                "type": "object",
                "description": "Calls the health service of gRPC.",
                "required": ["port"],
                "properties": {
                    "port": { "type": "integer", "format": "int32", "description": "Port, 1 to 65535." },
                    "service": {
                        "type": "string",
                        "maxLength": MAX_HOOK_CHARS,
                        "default": "",
                        "description": "Service whose health is requested; that of the server when empty."
                    }
                }
            },
            "initialDelaySeconds": seconds("Seconds from the container's start to its first probe; at least 1."),
            "periodSeconds": seconds("Seconds between probes; at least 1."),
            "timeoutSeconds": seconds("Seconds after which a probe fails; at least 1."),
            "successThreshold": seconds("Consecutive successes after which the state is Succeeded; at least 1."),
            "failureThreshold": seconds("Consecutive failures after which the state is Failed; at least 1."),
            "terminationGracePeriodSeconds": {
                "type": "integer",
                "format": "int64",
                "description": "Has no effect here: the probes of a PodProbeMarker stop no container."
            }
        }
    }))
}

fn exec_json() -> Value {
    json!({
        "type": "object",
        "description": "Runs a command in the container.",
        "properties": {
            "command": {
                "type": "array",
                "maxItems": MAX_HOOK_ITEMS,
                "x-kubernetes-list-type": "atomic",
                "items": { "type": "string", "maxLength": MAX_HOOK_CHARS },
                "description": "The program and its arguments; no shell is involved."
            }
        }
    })
}

fn tcp_socket_json(port: &Value, description: &str) -> Value {
    json!({
        "type": "object",
        "description": description,
        "required": ["port"],
        "properties": {
            "host": string_schema(MAX_HOOK_CHARS, "Host; the Pod's address when absent."),
            "port": port
        }
    })
}

fn http_get_json(port: &Value) -> Value {
    json!({
        "type": "object",
        "description": "Sends an HTTP GET request.",
        "required": ["port"],
        "properties": {
            "host": string_schema(MAX_HOOK_CHARS, "Host; the Pod's address when absent."),
            "path": string_schema(MAX_HOOK_CHARS, "Path of the request."),
            "port": port,
            "scheme": string_schema(MAX_LABEL_CHARS, "HTTP (when absent) or HTTPS."),
            "httpHeaders": {
                "type": "array",
                "maxItems": MAX_HOOK_ITEMS,
                "x-kubernetes-list-type": "atomic",
                "description": "Additional headers; names may repeat.",
                "items": {
                    "type": "object",
                    "required": ["name", "value"],
                    "properties": {
                        "name": string_schema(MAX_HOOK_CHARS, "Name of the header."),
                        "value": string_schema(MAX_HOOK_CHARS, "Value of the header.")
                    }
                }
            }
        }
    })
}

/// Conditions, as `meta/v1.Condition`, keyed by type.
pub(super) fn conditions(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "type": {
                    "type": "string",
                    "maxLength": 316,
                    "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
                    "description": "The condition's type."
                },
                "status": {
                    "type": "string",
                    "enum": ["True", "False", "Unknown"],
                    "description": "Whether the condition holds."
                },
                "observedGeneration": {
                    "type": "integer",
                    "format": "int64",
                    "minimum": 0,
                    "description": "Generation of the object that the condition was set for."
                },
                "lastTransitionTime": {
                    "type": "string",
                    "format": "date-time",
                    "description": "When the status last changed."
                },
                "reason": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                    "description": "Reason of the condition, in CamelCase."
                },
                "message": { "type": "string", "maxLength": 32768, "description": "Message of the condition, for humans." }
            }
        }
    }))
}
