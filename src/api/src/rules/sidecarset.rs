//! Limits and defaults of SidecarSet, the same in both versions. Everything else is checked by the webhook, with
//! OpenKruise's errors: without it a set cannot be written.

use serde_json::{Value, json};

use super::SchemaRule;
use super::cloneset::few_terms;
use crate::schemas::{MAX_KEY_CHARS, MAX_LABEL_CHARS};

fn key() -> Value {
    json!({ "maxLength": MAX_KEY_CHARS })
}

fn all_names() -> Value {
    json!({ "default": ".*" })
}

pub(crate) const ALL_VERSIONS: &[SchemaRule] = &[
    SchemaRule {
        path: "spec.containers.[].resourcesPolicy.targetContainersNameRegex",
        add: all_names,
    },
    SchemaRule {
        path: "spec.initContainers.[].resourcesPolicy.targetContainersNameRegex",
        add: all_names,
    },
    SchemaRule {
        path: "spec.imagePullSecrets.[].name",
        add: || json!({ "default": "" }),
    },
    SchemaRule {
        path: "spec.injectionStrategy.revision.policy",
        add: || json!({ "default": "Always" }),
    },
    SchemaRule {
        path: "spec.updateStrategy.priorityStrategy.weightPriority",
        add: few_terms,
    },
    SchemaRule {
        path: "spec.updateStrategy.priorityStrategy.orderPriority",
        add: few_terms,
    },
    SchemaRule {
        path: "spec.updateStrategy.priorityStrategy.orderPriority.[].orderedKey",
        add: key,
    },
    SchemaRule {
        path: "spec.updateStrategy.scatterStrategy",
        add: few_terms,
    },
    SchemaRule {
        path: "spec.updateStrategy.scatterStrategy.[].key",
        add: key,
    },
    SchemaRule {
        path: "spec.updateStrategy.scatterStrategy.[].value",
        add: || json!({ "maxLength": MAX_LABEL_CHARS }),
    },
];
