//! Launch priorities in the environment of a container.

use serde_json::Value;

use super::FieldErrors;
use crate::keys;

/// Adds an error for each launch priority of a container that is not a number.
pub fn check(container: &Value, field: &str, errors: &mut FieldErrors) {
    let env = container["env"].as_array().into_iter().flatten().enumerate();
    for (at, variable) in env.filter(|(_, v)| v["name"] == keys::ENV_CONTAINER_PRIORITY) {
        let value = &variable["value"];
        if value.as_str().and_then(|text| text.parse::<i64>().ok()).is_none() {
            let field = format!("{field}.env[{at}].value");
            errors.add(field, value, "a launch priority is a whole number, as 10 or -1");
        }
    }
}
